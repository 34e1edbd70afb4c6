//! `cargo xtask fuzz`: what a guest or a peer may hand over, tried at random, by targets that know what must hold.
//!
//! The targets are in `fuzz/`, in the layout of cargo-fuzz. That tool wants a nightly toolchain for the address sanitizer;
//! what libFuzzer itself needs, to be told which code an input reached, any toolchain can compile in.

use std::cmp::Reverse;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use crate::cache::{self, Cache};
use crate::progress::Step;
use crate::{build, host, repository};

/// How long `cargo xtask test` tries each target.
pub const SECONDS: u32 = 60;
/// Targets that run beside each other.
const AT_ONCE: usize = 2;
/// Coverage as libFuzzer reads it: which edges were taken how often, and what was compared with what.
const FLAGS: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "--cfg=fuzzing",
];
/// One input may have 4 KiB, and take 10 seconds and 512 MiB.
const LIMITS: &[&str] = &["-max_len=4096", "-timeout=10", "-rss_limit_mb=512"];
/// Inputs of one target that are kept in the repository.
const KEPT_MOST: usize = 48;

#[derive(Debug, Args)]
pub struct Options {
    /// Only this one
    target: Option<String>,
    /// How long to try each
    #[arg(long, default_value_t = SECONDS)]
    seconds: u32,
    /// Try this one input again, such as one that failed
    #[arg(long, requires = "target", conflicts_with_all = ["seconds", "keep"])]
    input: Option<PathBuf>,
    /// Afterwards put the few inputs that together reach most into fuzz/corpus
    #[arg(long)]
    keep: bool,
}

pub fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let targets = targets(options.target.as_deref())?;
    let programs = compile(cache)?;
    if let (Some(input), [target]) = (&options.input, targets.as_slice()) {
        let status = Command::new(programs.join(target)).args(LIMITS).arg(input).status();
        let passed = status.with_context(|| format!("cannot start target {target}"))?.success();
        return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    try_all(cache, &programs, &targets, options.seconds)?;
    if options.keep {
        for target in &targets {
            keep(cache, &programs, target)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Every target for [`SECONDS`].
pub fn all(cache: &Cache) -> Result<()> {
    try_all(cache, &compile(cache)?, &targets(None)?, SECONDS)
}

/// Formatting and lints of the targets, which are a workspace of their own.
pub fn lint(cache: &Cache) -> Result<()> {
    host::need(cache, &[host::BUILD, host::FUZZ].concat())?;
    let mut format = Command::new(build::cargo_program());
    format.args(["fmt", "--", "--check"]).current_dir(folder());
    // With the flags of the real thing, so that the C++ of libFuzzer is compiled once for both.
    let mut clippy = cargo("clippy")?;
    clippy.args(["--bins", "--lib", "--examples", "--", "-D", "warnings"]);
    for mut command in [format, clippy] {
        if !command.status().context("cannot start cargo")?.success() {
            bail!("mend what is named above, in fuzz/");
        }
    }
    Ok(())
}

fn folder() -> PathBuf {
    repository().join("fuzz")
}

/// What is built, found and failed: beside everything else that is built.
fn work() -> Result<PathBuf> {
    Ok(build::target_dir()?.join("fuzz"))
}

/// Each file of `fuzz/fuzz_targets` is one.
fn targets(only: Option<&str>) -> Result<Vec<String>> {
    let sources = fs::read_dir(folder().join("fuzz_targets")).context("cannot list the fuzz targets")?;
    let name = |source: fs::DirEntry| Some(source.file_name().to_str()?.strip_suffix(".rs")?.to_owned());
    let mut names: Vec<String> = sources.filter_map(Result::ok).filter_map(name).collect();
    names.sort_unstable();
    match only {
        None => Ok(names),
        Some(only) if names.iter().any(|name| name == only) => Ok(vec![only.to_owned()]),
        Some(only) => bail!("there is no fuzz target {only}; there are: {}", names.join(", ")),
    }
}

fn cargo(what: &str) -> Result<Command> {
    let mut command = Command::new(build::cargo_program());
    command
        .current_dir(folder())
        .env("RUSTFLAGS", FLAGS.join(" "))
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR")
        .args([what, "--quiet", "--release", "--target", build::TARGET, "--target-dir"])
        .arg(work()?);
    Ok(command)
}

/// Builds the targets; returns the folder they are in.
fn compile(cache: &Cache) -> Result<PathBuf> {
    host::need(cache, &[host::BUILD, host::FUZZ].concat())?;
    let _step = Step::begin(cache, "compile the fuzz targets")?;
    let status = cargo("build")?.arg("--bins").stdout(std::io::stderr()).status();
    if !status.context("cannot start cargo")?.success() {
        bail!("the fuzz targets do not build");
    }
    Ok(work()?.join(build::TARGET).join("release"))
}

/// Runs them, [`AT_ONCE`] beside each other, and says what came of each.
fn try_all(cache: &Cache, programs: &Path, targets: &[String], seconds: u32) -> Result<()> {
    let waiting = Mutex::new(targets.iter());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let next = || waiting.lock().ok()?.next();
                while let Some(target) = next() {
                    match try_one(cache, programs, target, seconds) {
                        Ok(report) => eprintln!("xtask: fuzz {target}: {report}"),
                        Err(why) => {
                            eprintln!("xtask: fuzz {target}: {why:#}");
                            failed.lock().map(|mut failed| failed.push(target.as_str())).unwrap_or_default();
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if failed.is_empty() { Ok(()) } else { Err(anyhow!("fuzzing failed: {}", failed.join(", "))) }
}

/// Tries one target; returns a line about it.
fn try_one(cache: &Cache, programs: &Path, target: &str, seconds: u32) -> Result<String> {
    let (found, failures) = (work()?.join("found").join(target), work()?.join("failures").join(target));
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&failures)?;
    let log = cache.log_file(&format!("fuzz {target}"))?;
    let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let status = Command::new(programs.join(target))
        .args(LIMITS)
        .arg(format!("-max_total_time={seconds}"))
        .args(["-print_final_stats=1", "-verbosity=1"])
        .arg(format!("-artifact_prefix={}/", failures.display()))
        // What is new goes to the first; the second is only read.
        .arg(&found)
        .arg(folder().join("corpus").join(target))
        .stdout(output.try_clone()?)
        .stderr(output)
        .status()
        .with_context(|| format!("cannot start target {target}"))?;
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    if status.success() {
        return Ok(Report::of(&text).ok_or_else(|| anyhow!("no figures in {}", log.display()))?.line());
    }
    let reproduce = match failure(&text) {
        Some(input) => format!("input:     {input}\nreproduce: cargo xtask fuzz {target} --input {input}"),
        None => "it left no input".to_owned(),
    };
    bail!("FAILED ({status})\n{}\n{reproduce}\nwhole log: {}", complaint(&text), log.display())
}

/// Leaves in `fuzz/corpus` the smallest set of inputs, of those there and those found, that takes every edge that all of them
/// take; where it is above [`KEPT_MOST`], the longest of it.
fn keep(cache: &Cache, programs: &Path, target: &str) -> Result<()> {
    let step = Step::begin(cache, &format!("fuzz {target}: choose inputs to keep"))?;
    let (corpus, found) = (folder().join("corpus").join(target), work()?.join("found").join(target));
    let chosen = work()?.join("chosen").join(target);
    cache::remove(&chosen)?;
    fs::create_dir_all(&chosen)?;
    fs::create_dir_all(&corpus)?;
    step.run(
        Command::new(programs.join(target))
            .args(LIMITS)
            .args(["-set_cover_merge=1", "-use_counters=0", "-use_cmp=0"])
            .args([&chosen, &corpus, &found]),
    )?;
    cache::remove(&corpus)?;
    fs::create_dir_all(&corpus)?;
    let mut inputs = Vec::new();
    for input in fs::read_dir(&chosen)? {
        let input = input?;
        inputs.push((Reverse(input.metadata()?.len()), input.path(), input.file_name()));
    }
    inputs.sort_unstable();
    inputs.truncate(KEPT_MOST);
    for (_, path, name) in &inputs {
        fs::copy(path, corpus.join(name))?;
    }
    eprintln!("xtask: fuzz {target}: {} inputs in {}", inputs.len(), corpus.display());
    Ok(())
}

/// What libFuzzer says at the end.
#[derive(Debug, PartialEq, Eq)]
struct Report {
    executions: u64,
    /// Edges of the program that were taken.
    edges: u64,
    /// Edges, how often, and comparisons.
    features: u64,
}

impl Report {
    fn of(log: &str) -> Option<Self> {
        let number = |text: &str| text.split_whitespace().next()?.parse().ok();
        let executions = log
            .lines()
            .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))
            .and_then(number)?;
        let last = log.lines().rev().find(|line| line.contains(" cov: ") && line.contains(" ft: "))?;
        let after = |name: &str| last.split_once(name).and_then(|(_, rest)| number(rest));
        Some(Self { executions, edges: after(" cov: ")?, features: after(" ft: ")? })
    }

    fn line(&self) -> String {
        format!(
            "nothing found in {} executions; {} edges and {} features reached",
            self.executions, self.edges, self.features
        )
    }
}

/// The input that libFuzzer says it wrote.
fn failure(log: &str) -> Option<&str> {
    log.lines().find_map(|line| line.split_once("Test unit written to ")).map(|(_, path)| path.trim())
}

/// What went wrong, in the words of the target or of libFuzzer.
fn complaint(log: &str) -> String {
    let mut lines = log.lines().skip_while(|line| !line.contains("panicked at") && !line.contains("ERROR:"));
    let shown: Vec<&str> = lines.by_ref().take(6).collect();
    shown.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
#2\tINITED cov: 10 ft: 11 corp: 1/1b exec/s: 0 rss: 26Mb
#4194304\tpulse  cov: 812 ft: 2044 corp: 403/12Kb lim: 176 exec/s: 131072 rss: 30Mb
#5304185\tDONE   cov: 813 ft: 2050 corp: 404/12Kb lim: 219 exec/s: 204007 rss: 30Mb
stat::number_of_executed_units: 5304185
stat::average_exec_per_sec:     204007
";

    #[test]
    fn the_figures_are_those_of_the_end() {
        let expected = Report { executions: 5_304_185, edges: 813, features: 2050 };
        assert_eq!(Report::of(LOG), Some(expected));
        assert_eq!(Report::of("killed"), None);
        assert_eq!(failure(LOG), None);
    }

    #[test]
    fn a_failure_names_its_input_and_its_reason() {
        let log = format!(
            "{LOG}\nthread '<unnamed>' panicked at block.rs:54:9:\nbeyond the end of the disk\n==1== ERROR: libFuzzer: deadly signal\n\
             artifact_prefix='/f/'; Test unit written to /f/crash-1a2b\n"
        );
        assert_eq!(failure(&log), Some("/f/crash-1a2b"));
        assert!(complaint(&log).starts_with("thread '<unnamed>' panicked at"));
        assert!(complaint(&log).contains("beyond the end of the disk"));
    }

    #[test]
    fn a_target_is_a_file() {
        assert!(targets(None).unwrap().contains(&"block".to_owned()));
        assert_eq!(targets(Some("net")).unwrap(), ["net"]);
        assert!(targets(Some("nothing")).is_err());
    }
}
