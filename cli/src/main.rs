//! `bivouac`: the command line, a client of the API like any other.

mod args;
mod client;
mod doctor;
mod follow;
mod sandboxes;
mod show;
mod transfer;
mod work;

use args::{Args, Command, Format};
use clap::Parser;
use client::{Client, Failure};
use std::process::ExitCode;

/// What bivouac itself failed at, as opposed to the command it ran.
pub const OWN_FAILURE: u8 = 125;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(OWN_FAILURE) } else { ExitCode::SUCCESS };
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => return fail(&Failure::Local(format!("no runtime: {cause}"))),
    };
    let done = runtime.block_on(run(args));
    // A thread may still be reading from a terminal: it is not waited for.
    runtime.shutdown_background();
    match done {
        Ok(code) => ExitCode::from(code),
        // Whoever read our output has gone, as in `| head`: no news to anybody.
        Err(Failure::Output(cause)) if cause.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::from(141),
        Err(failure) => fail(&failure),
    }
}

fn fail(failure: &Failure) -> ExitCode {
    eprintln!("bivouac: {failure}");
    ExitCode::from(OWN_FAILURE)
}

async fn run(args: Args) -> Result<u8, Failure> {
    let format = args.output;
    if let Command::Doctor { data_dir } = &args.command {
        return doctor(data_dir, format);
    }
    let client = Client::new(&args.connection)?;
    match args.command {
        Command::Run(run) => work::run(&client, run, format).await,
        Command::Exec(exec) => work::exec(&client, exec, format).await,
        Command::Create(create) => sandboxes::create(&client, create, format).await,
        Command::Ls { all, state } => sandboxes::list(&client, all, state, format).await,
        Command::Get { sandbox } => sandboxes::get(&client, &sandbox, format).await,
        Command::Rm { sandboxes, no_wait } => sandboxes::remove(&client, &sandboxes, no_wait, format).await,
        Command::Cp { from, to, user } => transfer::copy(&client, &from, &to, user, format).await,
        Command::Commands { sandbox } => sandboxes::commands(&client, &sandbox, format).await,
        Command::Templates => sandboxes::templates(&client, format).await,
        Command::Usage { sandbox } => sandboxes::usage(&client, sandbox, format).await,
        Command::Logs { sandbox } => sandboxes::logs(&client, &sandbox, format).await,
        Command::Openapi => sandboxes::openapi(&client).await,
        Command::Doctor { .. } => Ok(0),
    }
}

fn doctor(data_dir: &std::path::Path, format: Format) -> Result<u8, Failure> {
    let report = doctor::examine(data_dir);
    match format {
        Format::Json => show::json(&report)?,
        Format::Table => show::text(&report.render())?,
    }
    Ok(u8::from(!report.fit))
}
