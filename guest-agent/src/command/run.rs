//! From a request to a running leader, and from its end to a result.

use super::{
    Command, Reaper, Table,
    cgroup::Cgroup,
    pump::pump,
    reaper::Status,
    spawn::{self, Failure, Plan, Step},
};
use crate::{
    identity::Identity,
    users::{self, User},
};
use bivouac_protocol::agent::{
    Ended, Outcome, Refusal, StartCommand, StartFailure, StartFailureKind, Stream, TERM_GRACE_MS,
};
use rustix::pipe::{PipeFlags, pipe_with};
use std::{
    cell::RefCell,
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
    task::spawn_local,
    time::{Instant, sleep, timeout},
};

/// Where programs are looked for when the environment names no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// All commands of this boot, and what starting one needs.
#[derive(Debug, Default)]
pub struct Commands {
    pub table: Table,
    pub reaper: Reaper,
    /// Cgroups of commands that left a process behind.
    lingering: RefCell<Vec<Cgroup>>,
}

impl Commands {
    /// Starts a command, or records why it could not be; refuses an id that is taken. Nothing is awaited in here: an
    /// id is taken and its process started in one step.
    pub fn start(
        self: &Rc<Self>,
        identity: &Identity,
        request: &StartCommand,
        stdin: &OwnedFd,
    ) -> Result<Rc<Command>, Refusal> {
        check_id(&request.command_id)?;
        self.table.admit(&request.command_id)?;
        let command = match self.try_start(identity, request, stdin)? {
            Ok(command) => command,
            Err(failure) => Command::not_started(failure),
        };
        self.table.insert(&request.command_id, command.clone());
        Ok(command)
    }

    /// Removes the cgroups whose last process is gone by now.
    pub fn sweep(&self) {
        self.lingering.borrow_mut().retain(|cgroup| !cgroup.remove());
    }

    fn try_start(
        self: &Rc<Self>,
        identity: &Identity,
        request: &StartCommand,
        stdin: &OwnedFd,
    ) -> Result<Result<Rc<Command>, StartFailure>, Refusal> {
        let user = match users::find(request.user.as_deref().unwrap_or(&identity.user)) {
            Ok(user) => user,
            Err(e) => return Ok(Err(StartFailure { kind: users::NoSuchUser::KIND, detail: e.to_string() })),
        };
        let env = environment(identity, request, &user);
        let cwd = request.cwd.as_deref().unwrap_or(&identity.workdir);
        let program = request.argv.first().ok_or_else(|| invalid("argv is empty"))?;
        let path = env.iter().find_map(|(key, value)| (key == "PATH").then_some(value.as_str()));
        let candidates = candidates(program, path.unwrap_or(DEFAULT_PATH));
        let short = |e: io::Error| StartFailure {
            kind: kind_of(Step::Fork, &e),
            detail: format!("no resources: {e}"),
        };

        let resources = || -> io::Result<_> {
            let (stdout, stdout_child) = pipe_with(PipeFlags::CLOEXEC)?;
            let (stderr, stderr_child) = pipe_with(PipeFlags::CLOEXEC)?;
            let cgroup = Cgroup::create(&request.command_id)?;
            let directory = cgroup.open()?;
            Ok((watched(stdout)?, watched(stderr)?, stdout_child, stderr_child, cgroup, directory))
        };
        let (stdout, stderr, stdout_child, stderr_child, cgroup, directory) = match resources() {
            Ok(resources) => resources,
            Err(e) => return Ok(Err(short(e))),
        };
        let plan = Plan {
            candidates: strings(candidates.iter().map(String::as_str))?,
            argv: strings(request.argv.iter().map(String::as_str))?,
            env: env
                .iter()
                .map(|(key, value)| string(&format!("{key}={value}")))
                .collect::<Result<_, _>>()?,
            cwd: string(cwd)?,
            user: &user,
            stdin: stdin.as_fd(),
            stdout: stdout_child.as_fd(),
            stderr: stderr_child.as_fd(),
            cgroup: &directory,
        };
        let started = Instant::now();
        let pid = match spawn::spawn(&plan) {
            Ok(pid) => pid,
            Err(failure) => {
                // The child that reported it has ended, and is in the cgroup until it is reaped.
                if !cgroup.remove() {
                    self.lingering.borrow_mut().push(cgroup);
                }
                return Ok(Err(describe(&failure, program, cwd, &user)));
            }
        };
        let leader = self.reaper.expect(pid);
        let command = Command::new(pid);
        let (ended, end) = watch::channel(None);
        spawn_local(pump(command.clone(), Stream::Stdout, stdout, end.clone()));
        spawn_local(pump(command.clone(), Stream::Stderr, stderr, end));
        let limit = request.timeout_ms.map(Duration::from_millis);
        spawn_local(self.clone().see_through(command.clone(), leader, cgroup, limit, started, ended));
        Ok(Ok(command))
    }

    async fn see_through(
        self: Rc<Self>,
        command: Rc<Command>,
        mut leader: oneshot::Receiver<Status>,
        cgroup: Cgroup,
        limit: Option<Duration>,
        started: Instant,
        leader_ended: watch::Sender<Option<Instant>>,
    ) {
        let expired = async {
            match limit {
                Some(limit) => sleep(limit.saturating_sub(started.elapsed())).await,
                None => std::future::pending().await,
            }
        };
        let (status, outcome) = tokio::select! {
            biased;
            status = &mut leader => {
                let status = status.ok();
                (status, status.map(|status| of_status(status, &cgroup)))
            }
            () = expired => {
                let killed = end_all(&cgroup).await;
                (leader.await.ok(), Some(Outcome::TimedOut { killed }))
            }
            () = command.cancel.notified() => {
                let killed = end_all(&cgroup).await;
                (leader.await.ok(), Some(Outcome::Canceled { killed }))
            }
        };
        let wall = started.elapsed();
        // Read now: what a process that was left behind runs into later is not this command's result.
        let limits_hit = cgroup.limits_hit();
        leader_ended.send_replace(Some(Instant::now()));
        let mut changes = command.changes();
        while !command.look(|s| s.spool_ref(Stream::Stdout).closed() && s.spool_ref(Stream::Stderr).closed())
        {
            let _ = changes.changed().await;
        }
        // The reaper lives as long as the agent, so there is always a status.
        let outcome = outcome.unwrap_or(Outcome::Signaled { signal: libc::SIGKILL, oom_killed: false });
        command.change(|streams| {
            streams.ended = Some(Ended {
                outcome,
                stdout_bytes: streams.spool_ref(Stream::Stdout).end(),
                stderr_bytes: streams.spool_ref(Stream::Stderr).end(),
                wall_us: u64::try_from(wall.as_micros()).unwrap_or(u64::MAX),
                user_us: status.map_or(0, |status| status.user_us),
                system_us: status.map_or(0, |status| status.system_us),
                max_rss_kib: status.map_or(0, |status| status.max_rss_kib),
                limits_hit,
            });
        });
        if !cgroup.remove() {
            self.lingering.borrow_mut().push(cgroup);
        }
    }
}

/// TERM, the grace, KILL; whether KILL was needed. Nothing of the command is left when this returns.
async fn end_all(cgroup: &Cgroup) -> bool {
    cgroup.signal(libc::SIGTERM);
    // A stopped process has to go on to hear it.
    cgroup.signal(libc::SIGCONT);
    let left = timeout(Duration::from_millis(TERM_GRACE_MS), cgroup.emptied()).await.is_err();
    if left {
        cgroup.kill();
        cgroup.emptied().await;
    }
    left
}

fn of_status(status: Status, cgroup: &Cgroup) -> Outcome {
    if libc::WIFSIGNALED(status.raw) {
        let signal = libc::WTERMSIG(status.raw);
        return Outcome::Signaled { signal, oom_killed: signal == libc::SIGKILL && cgroup.oom_killed() };
    }
    Outcome::Exited { code: u8::try_from(libc::WEXITSTATUS(status.raw)).unwrap_or(u8::MAX) }
}

/// Ids name cgroups, so they are plain.
fn check_id(id: &str) -> Result<(), Refusal> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if (1..=64).contains(&id.len()) && id.bytes().all(plain) {
        Ok(())
    } else {
        Err(invalid("a command id has 1 to 64 letters, digits, `_` and `-`"))
    }
}

fn invalid(why: &str) -> Refusal {
    Refusal::Invalid { detail: why.to_owned() }
}

fn string(text: &str) -> Result<CString, Refusal> {
    CString::new(text).map_err(|_| invalid("a NUL byte in argv, env or cwd"))
}

fn strings<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<CString>, Refusal> {
    texts.map(string).collect()
}

/// The sandbox's environment with the request's over it. What every login sets (home, name, search path) comes from the
/// image's account where neither names it.
fn environment(identity: &Identity, request: &StartCommand, user: &User) -> Vec<(String, String)> {
    let mut env: Vec<(String, String)> =
        vec![("PATH".into(), DEFAULT_PATH.into()), ("HOME".into(), user.home.clone())];
    if !user.name.is_empty() {
        env.push(("USER".into(), user.name.clone()));
        env.push(("LOGNAME".into(), user.name.clone()));
    }
    // What the template says of its own user does not hold for another.
    let same_user = request.user.as_ref().is_none_or(|wanted| *wanted == identity.user);
    let personal = ["HOME", "USER", "LOGNAME"];
    let base = identity.env.iter().filter(|(key, _)| same_user || !personal.contains(&key.as_str()));
    for (key, value) in base.chain(&request.env) {
        match env.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => old.clone_from(value),
            None => env.push((key.clone(), value.clone())),
        }
    }
    env
}

fn candidates(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    path.split(':')
        .map(
            |directory| {
                if directory.is_empty() { program.to_owned() } else { format!("{directory}/{program}") }
            },
        )
        .collect()
}

fn watched(pipe: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&pipe, true)?;
    // SAFETY: the registration owns the descriptor, which stays open until it is deregistered.
    Ok(unsafe { AsyncFd::register_with_interest(pipe, Interest::READABLE) }?)
}

fn kind_of(step: Step, error: &io::Error) -> StartFailureKind {
    match (step, error.raw_os_error()) {
        (Step::Interpreter, _) => StartFailureKind::BadInterpreter,
        (_, Some(libc::ENOMEM)) => StartFailureKind::OutOfMemory,
        (Step::Fork, Some(libc::EAGAIN)) => StartFailureKind::TooManyProcesses,
        (Step::Directory, Some(libc::EACCES | libc::EPERM)) => StartFailureKind::DirectoryForbidden,
        (Step::Directory, _) => StartFailureKind::NoSuchDirectory,
        (Step::Execute, Some(libc::ENOENT | libc::ENOTDIR)) => StartFailureKind::NotFound,
        (Step::Execute, Some(libc::EACCES | libc::ENOEXEC | libc::EPERM | libc::EISDIR)) => {
            StartFailureKind::NotExecutable
        }
        (Step::Execute, Some(libc::E2BIG)) => StartFailureKind::ArgumentsTooLong,
        _ => StartFailureKind::Other,
    }
}

fn describe(Failure { step, error }: &Failure, program: &str, cwd: &str, user: &User) -> StartFailure {
    let kind = kind_of(*step, error);
    let detail = match (kind, step) {
        (StartFailureKind::NotFound, _) => format!("no program `{program}` in the sandbox"),
        (StartFailureKind::NotExecutable, _) => format!("`{program}` cannot be executed: {error}"),
        (StartFailureKind::BadInterpreter, _) => {
            format!("`{program}` is there, but the interpreter or loader it names is not")
        }
        (StartFailureKind::NoSuchDirectory, _) => {
            format!("cannot enter the working directory `{cwd}`: {error}")
        }
        (StartFailureKind::DirectoryForbidden, _) => {
            format!("user {} may not enter the working directory `{cwd}`: {error}", user.uid)
        }
        (StartFailureKind::ArgumentsTooLong, _) => {
            "argv and env together are too long for the kernel".to_owned()
        }
        (_, Step::Credentials) => format!("cannot become user {}: {error}", user.uid),
        (_, Step::Fork) => format!("cannot make a process: {error}"),
        _ => format!("cannot start `{program}`: {error}"),
    };
    StartFailure { kind, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(env: &[(&str, &str)], user: Option<&str>) -> StartCommand {
        StartCommand {
            command_id: "cmd_1".into(),
            argv: vec!["true".into()],
            cwd: None,
            env: env.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
            user: user.map(Into::into),
            timeout_ms: None,
        }
    }

    #[test]
    fn the_environment_is_the_sandboxs_with_the_requests_over_it() {
        let pairs = |list: &[(&str, &str)]| list.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let identity = Identity {
            env: pairs(&[("A", "1"), ("HOME", "/work")]),
            user: "user".into(),
            workdir: "/".into(),
        };
        let user =
            User { uid: 1000, gid: 1000, groups: vec![], name: "user".into(), home: "/home/user".into() };
        let find =
            |env: &[(String, String)], key: &str| env.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
        let env = environment(&identity, &request(&[("A", "2")], None), &user);
        assert_eq!(find(&env, "A").as_deref(), Some("2"));
        assert_eq!(find(&env, "HOME").as_deref(), Some("/work"));
        assert_eq!(find(&env, "PATH").as_deref(), Some(DEFAULT_PATH));
        let root = User { uid: 0, gid: 0, groups: vec![], name: "root".into(), home: "/root".into() };
        let env = environment(&identity, &request(&[], Some("root")), &root);
        assert_eq!(find(&env, "HOME").as_deref(), Some("/root"));
    }

    #[test]
    fn a_directory_that_is_missing_and_one_that_is_forbidden_are_told_apart() {
        let kind = |errno| kind_of(Step::Directory, &io::Error::from_raw_os_error(errno));
        assert_eq!(kind(libc::ENOENT), StartFailureKind::NoSuchDirectory);
        assert_eq!(kind(libc::ENOTDIR), StartFailureKind::NoSuchDirectory);
        assert_eq!(kind(libc::EACCES), StartFailureKind::DirectoryForbidden);
    }

    #[test]
    fn programs_are_looked_for_as_a_shell_does() {
        assert_eq!(candidates("./x", "/bin"), ["./x"]);
        assert_eq!(candidates("x", "/a::/b"), ["/a/x", "x", "/b/x"]);
    }

    #[test]
    fn ids_that_could_name_another_directory_are_refused() {
        for id in ["", "..", "a/b", "a b", &"x".repeat(65)] {
            assert!(check_id(id).is_err(), "{id}");
        }
        assert!(check_id("cmd_01H-x").is_ok());
    }
}
