//! Printing: documents as JSON, lists as tables. Nothing here panics when its reader has gone.

use crate::client::Failure;
use serde::Serialize;
use serde_json::Value;
use std::io::{self, Write};

pub fn text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

pub fn line(line: &str) -> Result<(), Failure> {
    text(&format!("{line}\n"))
}

pub fn json(value: &impl Serialize) -> Result<(), Failure> {
    let pretty = serde_json::to_string_pretty(value).map_err(|e| Failure::Local(e.to_string()))?;
    line(&pretty)
}

/// Columns as wide as their widest cell.
pub fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> Result<(), Failure> {
    let mut widths = head.map(|cell| cell.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in std::iter::once(&head.map(str::to_owned)).chain(rows) {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    text(&out)
}

/// A document as names and values, one a line.
pub fn fields(document: &Value) -> Result<(), Failure> {
    let mut rows = Vec::new();
    flatten("", document, &mut rows);
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    text(&rows.into_iter().map(|(name, value)| format!("{name:<width$}  {value}\n")).collect::<String>())
}

fn flatten(prefix: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&name, value, rows);
            }
        }
        Value::Null => {}
        other => rows.push((prefix.to_owned(), plain(other))),
    }
}

/// A value as people read it: text without quotes, nothing as nothing.
pub fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Milliseconds as people read them.
pub fn milliseconds(value: &Value) -> String {
    match value.as_u64() {
        None => String::new(),
        Some(ms) if ms < 10_000 => format!("{ms} ms"),
        Some(ms) if ms < 600_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        Some(ms) => format!("{} min", ms / 60_000),
    }
}
