//! `cargo xtask test`: every check there is, cheapest first, all of them even if one fails.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use crate::cache::Cache;
use crate::kvmfit::{Guests, Place};
use crate::progress::Step;
use crate::{build, fuzz, host, repository};

/// The one that licences, bans and sources are checked with; pinned, so that a new release is a change here.
const CARGO_DENY: &str = "0.20.2";
/// The package whose tests need machines.
const END_TO_END: &str = "bivouac-tests";
/// More than every end-to-end test takes in a lab on a machine that is busy with others.
const SECONDS: u64 = 3600;
/// Where no network is, fetching a database must not hold up the rest.
const FETCH_SECONDS: &str = "60";

#[derive(Debug, Args)]
pub struct Options {
    /// Only formatting, lints, licences
    #[arg(long)]
    lint: bool,
    /// Only the tests beside the code
    #[arg(long)]
    unit: bool,
    /// Only the fuzz targets, each for a minute
    #[arg(long)]
    fuzz: bool,
    /// Only the tests on real guests
    #[arg(long)]
    e2e: bool,
    /// Only tests whose name contains this
    filter: Option<String>,
    /// For the test programs, such as `--nocapture`
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// How many times longer than usual hostile guests attack, if set.
const LONGER: &str = "BIVOUAC_HOSTILE_TIMES";

type Check<'a> = (&'a str, Box<dyn Fn() -> Result<()> + 'a>);

pub fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let all = !(options.lint || options.unit || options.fuzz || options.e2e);
    let mut checks: Vec<Check<'_>> = Vec::new();
    if options.lint || (all && options.filter.is_none()) {
        checks.push(("formatting", Box::new(formatting)));
        checks.push(("lints", Box::new(lints)));
        checks.push(("formatting and lints of the fuzz targets", Box::new(|| fuzz::lint(cache))));
        checks.push(("dependencies", Box::new(|| dependencies(cache))));
    }
    if options.unit || all {
        checks.push(("unit tests", Box::new(|| unit(options))));
    }
    if options.fuzz || (all && options.filter.is_none()) {
        checks.push(("fuzzing", Box::new(|| fuzz::all(cache))));
    }
    if options.e2e || all {
        host::need_root("running guests")?;
        checks.push(("end-to-end tests", Box::new(|| end_to_end(cache, options))));
    }
    host::need(cache, &[host::BUILD, host::RUN].concat())?;

    let mut results = Vec::new();
    for (name, check) in checks {
        eprintln!("\nxtask: {name}");
        let begun = Instant::now();
        let result = check();
        if let Err(why) = &result {
            eprintln!("xtask: {name}: {why:#}");
        }
        results.push((name, begun.elapsed(), result.is_ok()));
    }
    Ok(summary(&results))
}

fn summary(results: &[(&str, Duration, bool)]) -> ExitCode {
    eprintln!();
    for (name, time, passed) in results {
        let verdict = if *passed { "passed" } else { "FAILED" };
        eprintln!("xtask: {verdict}  {name} ({:.1} s)", time.as_secs_f64());
    }
    if results.iter().all(|(_, _, passed)| *passed) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn formatting() -> Result<()> {
    cargo(&["fmt", "--all", "--", "--check"], "run `cargo fmt`")?;
    hostile_guest(&["fmt", "--", "--check"], "run `cargo fmt` in hostile-guest/")
}

fn lints() -> Result<()> {
    cargo(
        &["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"],
        "mend what clippy names above",
    )?;
    hostile_guest(
        &["clippy", "--quiet", "--", "-D", "warnings"],
        "mend what clippy names above, in hostile-guest/",
    )
}

/// A workspace of its own, since it is built as nothing else is.
fn hostile_guest(arguments: &[&str], remedy: &str) -> Result<()> {
    let mut command = Command::new(build::cargo_program());
    command.args(arguments).current_dir(repository().join("hostile-guest"));
    command.env("CARGO_TARGET_DIR", build::target_dir()?.join("hostile-guest"));
    succeed(&mut command, remedy)
}

/// Licences, bans and sources always; known faults where their database can be had.
fn dependencies(cache: &Cache) -> Result<()> {
    let deny = cargo_deny(cache)?;
    let check = |what: &[&str]| {
        // The fuzz targets are a workspace of their own.
        ["Cargo.toml", "fuzz/Cargo.toml"].into_iter().try_for_each(|manifest| {
            let mut command = Command::new(&deny);
            command.current_dir(repository()).args(["--log-level", "error", "--config", "deny.toml"]);
            command.args(["--manifest-path", manifest, "check", "--hide-inclusion-graph"]).args(what);
            succeed(&mut command, "deny.toml says what is allowed, and why")
        })
    };
    check(&["licenses", "bans", "sources"])?;
    let fetched = Command::new("timeout")
        .arg(FETCH_SECONDS)
        .arg(&deny)
        .args(["--log-level", "off", "fetch", "db"])
        .current_dir(repository())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if fetched.is_ok_and(|status| status.success()) {
        return check(&["--disable-fetch", "advisories"]);
    }
    eprintln!(
        "xtask: notice: known faults of dependencies were not checked: their database cannot be reached from here"
    );
    Ok(())
}

fn unit(options: &Options) -> Result<()> {
    let mut arguments = vec!["test", "--workspace", "--exclude", END_TO_END];
    arguments.extend(options.filter.as_deref());
    arguments.push("--");
    arguments.extend(options.arguments.iter().map(String::as_str));
    cargo(&arguments, "a test of a single crate is run by `cargo test -p CRATE NAME`")
}

fn end_to_end(cache: &Cache, options: &Options) -> Result<()> {
    let place = Place::choose();
    let prefix = build::all(cache)?;
    let hostile_guest = build::hostile_guest(cache)?;
    let programs = test_programs()?;
    let mut arguments = vec!["-c".to_owned(), one_after_the_other(&programs), "sh".to_owned()];
    arguments.extend(options.filter.iter().cloned());
    arguments.extend(options.arguments.iter().cloned());
    let code = place.run(
        cache,
        &Guests {
            program: Path::new("/bin/sh"),
            arguments: &arguments,
            env: &[
                ("BIVOUAC_PREFIX", prefix.display().to_string()),
                ("BIVOUAC_HOSTILE_GUEST", hostile_guest.display().to_string()),
                (LONGER, std::env::var(LONGER).unwrap_or_default()),
            ],
            shared: &[build::target_dir()?],
            retryable: true,
            seconds: SECONDS,
        },
    )?;
    if code != ExitCode::SUCCESS {
        bail!("some failed; run one test by `cargo xtask test --e2e NAME`");
    }
    Ok(())
}

/// A shell's script that runs all programs, each with the script's arguments, and fails if one does. So one stay in the
/// lab, which takes a while to come up, does for all of them.
fn one_after_the_other(programs: &[PathBuf]) -> String {
    let quoted = |path: &PathBuf| format!("'{}'", path.display().to_string().replace('\'', r"'\''"));
    let runs = programs.iter().map(|path| format!("{} \"$@\" || failed=1\n", quoted(path)));
    format!("failed=0\n{}exit $failed\n", runs.collect::<String>())
}

/// Builds the end-to-end tests; returns the programs that are them.
fn test_programs() -> Result<Vec<PathBuf>> {
    let output = Command::new(build::cargo_program())
        .args(["test", "--quiet", "--no-run", "--release", "--message-format=json", "--package", END_TO_END])
        .current_dir(repository())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the end-to-end tests do not build: `cargo test --no-run --release -p {END_TO_END}` says why");
    }
    let programs = executables(&String::from_utf8_lossy(&output.stdout));
    if programs.is_empty() {
        bail!("package {END_TO_END} has no tests");
    }
    Ok(programs)
}

/// The test programs that cargo's messages name.
fn executables(messages: &str) -> Vec<PathBuf> {
    let program = |line: &str| -> Option<PathBuf> {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_test = message.get("profile")?.get("test")?.as_bool()?;
        let program = message.get("executable")?.as_str()?;
        is_test.then(|| PathBuf::from(program))
    };
    messages.lines().filter_map(program).collect()
}

/// Installed into the cache when it is not there. Unoptimized, since it has half a second of work to do and takes minutes to
/// compile otherwise.
fn cargo_deny(cache: &Cache) -> Result<PathBuf> {
    let folder = cache.folder(&format!("tools/cargo-deny-{CARGO_DENY}"), |out| {
        host::need(cache, host::BUILD)?;
        let step = Step::begin(cache, "install cargo-deny")?;
        let work = out.join("work");
        step.run(
            Command::new(build::cargo_program())
                .args(["install", "--locked", "--no-track", "--debug", "cargo-deny", "--version", CARGO_DENY])
                .args(["--config", "profile.dev.debug=false", "--root"])
                .arg(out)
                .arg("--target-dir")
                .arg(&work)
                // Away from the checkout, whose target and flags are for what runs in guests.
                .current_dir(cache.root())
                .env_remove("CARGO_TARGET_DIR"),
        )?;
        Ok(std::fs::remove_dir_all(&work)?)
    })?;
    Ok(folder.join("bin/cargo-deny"))
}

fn cargo(arguments: &[&str], remedy: &str) -> Result<()> {
    succeed(Command::new(build::cargo_program()).args(arguments).current_dir(repository()), remedy)
}

fn succeed(command: &mut Command, remedy: &str) -> Result<()> {
    let program = Path::new(command.get_program())
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let status = command.status().with_context(|| format!("cannot start {program}"))?;
    status.success().then_some(()).ok_or_else(|| anyhow!("{program} failed ({status}): {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_is_run_with_the_same_arguments_and_one_that_fails_is_enough() {
        let run = |programs: &[&str]| {
            let programs: Vec<PathBuf> = programs.iter().map(PathBuf::from).collect();
            let script = one_after_the_other(&programs);
            Command::new("/bin/sh").args(["-c", &script, "sh", "a b", "c"]).output().unwrap()
        };
        let passed = run(&["/bin/echo", "/bin/echo"]);
        assert!(passed.status.success());
        assert_eq!(passed.stdout, b"a b c\na b c\n");
        let failed = run(&["/bin/false", "/bin/it's not there", "/bin/echo"]);
        assert_eq!((failed.status.code(), failed.stdout.as_slice()), (Some(1), b"a b c\n".as_slice()));
    }

    #[test]
    fn only_programs_that_are_tests_are_run() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","profile":{"test":false},"executable":"/t/bivouac-demo"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/e2e-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","profile":{"test":true},"executable":null}"#,
            "\nnot json\n",
        );
        assert_eq!(executables(messages), [PathBuf::from("/t/e2e-1")]);
    }
}
