//! The command line's grammar and its help.

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Throw-away microVMs: run code that nobody reviewed in a machine of its own.
#[derive(Debug, Parser)]
#[command(
    name = "bivouac",
    version,
    after_help = "\
Examples:
  bivouac run python -- python3 -c 'print(6 * 7)'    a machine for one command, gone afterwards
  bivouac create python                              a machine that stays; prints its id
  bivouac cp program.py ID:program.py
  bivouac exec ID -- python3 program.py
  bivouac cp ID:result.json .
  bivouac rm ID

Exit codes:
  run and exec pass on the exit code of the command in the guest, or
    124  the command reached its --timeout
    125  bivouac itself failed, or there is no telling what became of the command
    126  the command could not be started
    127  the command was not found
    128+N  the command was ended by signal N
  everything else: 0, or 125 with one line on standard error. doctor: 1 if this host cannot run sandboxes.

The key is taken from --key or BIVOUAC_KEY, else from --key-file or BIVOUAC_KEY_FILE."
)]
pub struct Args {
    #[command(flatten)]
    pub connection: Connection,
    /// How to print results.
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    pub output: Format,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

#[derive(Debug, ClapArgs)]
pub struct Connection {
    /// Address of the daemon.
    #[arg(long, global = true, env = "BIVOUAC_SERVER", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    /// API key. Prefer the environment or a file: arguments can be seen by other users.
    #[arg(long, global = true, env = "BIVOUAC_KEY", hide_env_values = true)]
    pub key: Option<String>,
    /// File with the API key, used if no key is given.
    #[arg(long, global = true, env = "BIVOUAC_KEY_FILE", default_value = "/var/lib/bivouac/admin.key")]
    pub key_file: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run one command in a machine of its own, and delete the machine on every way out.
    Run(Run),
    /// Create a sandbox and print its id once it is usable.
    Create(Create),
    /// List sandboxes.
    Ls {
        /// Deleted ones too.
        #[arg(long)]
        all: bool,
        /// Only those in this state.
        #[arg(long, conflicts_with = "all")]
        state: Option<String>,
    },
    /// Show one sandbox.
    Get {
        /// Id of the sandbox.
        sandbox: String,
    },
    /// Run a command in a sandbox.
    Exec(Exec),
    /// Copy a file into a sandbox or out of it.
    #[command(after_help = "\
Examples:
  bivouac cp program.py ID:program.py       into the working directory there
  bivouac cp program.py ID:/opt/            keeps its name
  bivouac cp ID:/var/log/x.log .            out of it
  bivouac cp ID:result.json - | jq .        to standard output")]
    Cp {
        /// A local path, `-` for standard input, or SANDBOX:PATH.
        from: String,
        /// A local path, `-` for standard output, or SANDBOX:PATH.
        to: String,
        /// Whose rights apply in the guest.
        #[arg(short, long)]
        user: Option<String>,
    },
    /// List a sandbox's commands.
    Commands {
        /// Id of the sandbox.
        sandbox: String,
    },
    /// Delete sandboxes, and wait until everything they held is released.
    Rm {
        /// Ids of the sandboxes.
        #[arg(required = true)]
        sandboxes: Vec<String>,
        /// Return once the delete is recorded.
        #[arg(long)]
        no_wait: bool,
    },
    /// List what sandboxes can be made from.
    Templates,
    /// Show what was used, by one sandbox or by all.
    Usage {
        /// Id of the sandbox; all of them if left out.
        sandbox: Option<String>,
    },
    /// Print what a sandbox's monitor has logged, and its guest's console if it has one.
    Logs {
        /// Id of the sandbox.
        sandbox: String,
    },
    /// Print the API's description.
    Openapi,
    /// Say whether this host can run sandboxes, what slows it down, and what to change. Needs no daemon.
    Doctor {
        /// Where sandboxes keep their disks.
        #[arg(long, env = "BIVOUAC_DATA_DIR", default_value = "/var/lib/bivouac")]
        data_dir: PathBuf,
    },
}

/// What a new sandbox is to be.
#[derive(Debug, Clone, ClapArgs)]
pub struct Shape {
    /// Memory in MiB; the template's if left out.
    #[arg(long, value_name = "MIB")]
    pub memory_mib: Option<u32>,
    /// Processors; the template's if left out.
    #[arg(long)]
    pub vcpus: Option<u32>,
    /// Disk in MiB; the template's if left out.
    #[arg(long, value_name = "MIB")]
    pub disk_mib: Option<u32>,
    /// A name to know it by.
    #[arg(long)]
    pub name: Option<String>,
    /// Delete it after this time, such as 10m or 2h.
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub ttl: Option<Duration>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  bivouac create python
  bivouac create base --memory-mib 256 --ttl 1h --name build -e TOKEN=abc
  ID=$(bivouac create python)")]
pub struct Create {
    /// What to make it from; `bivouac templates` lists them.
    pub template: String,
    #[command(flatten)]
    pub shape: Shape,
    /// Environment of every command, as NAME=VALUE, or NAME to pass on your own.
    #[arg(short, long, value_parser = variable, value_name = "NAME=VALUE")]
    pub env: Vec<(String, String)>,
    /// A label, as NAME=VALUE.
    #[arg(long, value_parser = variable, value_name = "NAME=VALUE")]
    pub metadata: Vec<(String, String)>,
    /// Idempotency key; a new one for each call if left out.
    #[arg(long)]
    pub request_id: Option<String>,
    /// Return at once, without waiting until it is usable.
    #[arg(long)]
    pub no_wait: bool,
}

/// How a command runs.
#[derive(Debug, Clone, ClapArgs)]
pub struct How {
    /// End the command after this time, such as 500ms, 30s or 5m; a plain number is seconds.
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
    /// Environment, as NAME=VALUE, or NAME to pass on your own.
    #[arg(short, long, value_parser = variable, value_name = "NAME=VALUE")]
    pub env: Vec<(String, String)>,
    /// Working directory.
    #[arg(short = 'w', long)]
    pub cwd: Option<String>,
    /// User to run as; the template's if left out.
    #[arg(short, long)]
    pub user: Option<String>,
    /// Pass on standard input, at most 1 MiB of it. Without this the command finds its input empty.
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Program and arguments.
    #[arg(required = true, last = true)]
    pub command: Vec<String>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  bivouac run python -- python3 -c 'print(6 * 7)'
  bivouac run base --timeout 10s -e GREETING=hello -- sh -c 'echo $GREETING'
  echo 'print(1)' | bivouac run -i python -- python3 -")]
pub struct Run {
    /// What to make the machine from; `bivouac templates` lists them.
    pub template: String,
    #[command(flatten)]
    pub shape: Shape,
    #[command(flatten)]
    pub how: How,
    /// Leave the sandbox, and name it on standard error.
    #[arg(long)]
    pub keep: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  bivouac exec ID -- ls -l
  bivouac exec ID --timeout 30s -w /tmp -u root -- make
  cat data | bivouac exec -i ID -- wc -c
  bivouac exec ID --request-id nightly-17 -- ./job    run it again and get the same result, not a second run

Interrupting (Ctrl-C) cancels the command; a lost connection does not.")]
pub struct Exec {
    /// Id of the sandbox.
    pub sandbox: String,
    #[command(flatten)]
    pub how: How,
    /// Idempotency key; a new one for each call if left out.
    #[arg(long)]
    pub request_id: Option<String>,
    /// Return once it has started, and print its id.
    #[arg(short, long)]
    pub detach: bool,
}

/// `500ms`, `30s`, `5m`, `2h`, or plain seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "write it as 500ms, 30s, 5m or 2h".to_owned())?;
    let ms = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1_000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => return Err(format!("`{unit}` is no unit of time: use ms, s, m or h")),
    };
    match ms {
        Some(ms @ 1..) => Ok(Duration::from_millis(ms)),
        _ => Err("it must be more than nothing, and not more than a number holds".to_owned()),
    }
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.to_owned()),
        None => {
            let value = std::env::var(text).map_err(|_| format!("`{text}` is not in your environment"))?;
            (text.to_owned(), value)
        }
    };
    if name.is_empty() { Err("the name before `=` is missing".to_owned()) } else { Ok((name, value)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_is_sound_and_the_examples_of_the_help_are_in_it() {
        use clap::CommandFactory;
        Args::command().debug_assert();
        for line in [
            "bivouac run python -- python3 -c x",
            "bivouac run --timeout 1s base -- sleep 100",
            "bivouac -o json create base --memory-mib 256 --ttl 1h --name build -e TOKEN=abc",
            "bivouac exec ID --timeout 30s -w /tmp -u root -- make",
            "bivouac exec -i ID -- wc -c",
            "bivouac exec ID --request-id nightly-17 -- ./job -x --y",
            "bivouac cp ID:result.json -",
            "bivouac ls -o json",
            "bivouac rm A B",
            "bivouac doctor -o json",
        ] {
            Args::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        assert!(Args::try_parse_from(["bivouac", "exec", "ID", "ls"]).is_err(), "without -- it is ambiguous");
    }

    #[test]
    fn every_argument_of_every_command_is_explained() {
        use clap::CommandFactory;
        let mut args = Args::command();
        args.build();
        for command in args.get_subcommands().filter(|command| command.get_name() != "help") {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        for bad in ["", "0", "s", "5x", "-1s", "99999999999999999999h", "18446744073709551615h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
