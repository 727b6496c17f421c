//! Runs the real daemon on a simulated host, as an ordinary user.
//!
//! `gpuward-sim dgx-h100 --shell` leaves you at a prompt where `gpuward` and `busctl` talk to that host. The same program is, by
//! its first word, the daemon itself and the process that stands in for a machine's QEMU.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, thread};

use clap::Parser;
use tests::polkit::Who;
use tests::session::{self, Session};
use tests::simhost::{SimRoot, names};
use tests::standin;

/// Runs gpuward on a simulated host.
#[derive(Debug, Parser)]
#[command(name = "gpuward-sim", version)]
struct Arguments {
    /// The host to simulate.
    #[arg(value_parser = names())]
    host: String,
    /// Lay the host here and keep it; a host that is here already is used as it is.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Only lay the files, for `gpuward list --root DIR`.
    #[arg(long, requires = "root", conflicts_with_all = ["shell", "command"])]
    tree: bool,
    /// Stay at a prompt on that host.
    #[arg(long, conflicts_with = "command")]
    shell: bool,
    /// Run this on that host, and end with its exit status. Without it, wait for Ctrl-C.
    #[arg(last = true)]
    command: Vec<String>,
}

type Failed = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let result = match words.first().map(String::as_str) {
        Some(standin::WORD) => hold(&words),
        Some(session::DAEMON_WORD) => daemon(&words[1..]),
        _ => run(&Arguments::parse()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("gpuward-sim: {}", chain(error.as_ref()));
        ExitCode::FAILURE
    })
}

/// As a stand-in of libvirt's hypervisor: the console comes after its word, the nodes after the UUID.
fn hold(words: &[String]) -> Result<ExitCode, Failed> {
    let nodes: Vec<_> = words.iter().skip_while(|word| *word != "-uuid").skip(2).cloned().collect();
    let console = words.iter().skip_while(|word| *word != "-console").nth(1).ok_or("a stand-in wants a console")?;
    standin::stand_in(console, &nodes)?;
    Ok(ExitCode::SUCCESS)
}

/// As the daemon of a session.
fn daemon(words: &[String]) -> Result<ExitCode, Failed> {
    let [root, address] = words else { return Err("the daemon wants a root and a bus address".into()) };
    session::run_daemon(Path::new(root), address, &env::current_exe()?)?;
    Ok(ExitCode::SUCCESS)
}

fn run(arguments: &Arguments) -> Result<ExitCode, Failed> {
    let root = match &arguments.root {
        Some(dir) => SimRoot::kept(&arguments.host, dir)?,
        None => SimRoot::temporary(&arguments.host)?,
    };
    if arguments.tree {
        return Ok(ExitCode::SUCCESS);
    }
    let mut session = Session::start(root, &env::current_exe()?)?;
    session.polkit.allow("*", Who::Uid(rustix::process::getuid().as_raw()));
    stop::catch()?;
    if arguments.shell {
        tell(&session)?;
        return finish(session, &mut shell);
    }
    match arguments.command.split_first() {
        Some((program, rest)) => finish(session, &mut |session| {
            let mut command = session.command(program);
            command.args(rest);
            command
        }),
        None => {
            tell(&session)?;
            wait(&mut session)
        }
    }
}

/// Runs a command on the simulated host and keeps the daemon alive as systemd would, until it ends.
fn finish(mut session: Session, make: &mut dyn FnMut(&Session) -> Command) -> Result<ExitCode, Failed> {
    let mut command = make(&session);
    let mut child = command.spawn().map_err(|error| format!("{} does not start: {error}", command.get_program().display()))?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)));
        }
        if stop::asked() {
            child.kill()?;
            child.wait()?;
            return Ok(ExitCode::FAILURE);
        }
        keep_alive(&mut session)?;
        thread::sleep(PAUSE);
    }
}

fn wait(session: &mut Session) -> Result<ExitCode, Failed> {
    while !stop::interrupted() && !stop::asked() {
        keep_alive(session)?;
        thread::sleep(PAUSE);
    }
    Ok(ExitCode::SUCCESS)
}

/// As `Restart=on-failure` of the unit: a daemon that was killed is started again.
fn keep_alive(session: &mut Session) -> Result<(), Failed> {
    let Some(status) = session.daemon_ended()? else { return Ok(()) };
    eprintln!("gpuward-sim: the daemon ended ({status}); starting it again");
    Ok(session.start_daemon()?)
}

fn shell(session: &Session) -> Command {
    let mut command = session.command("bash");
    // A prompt of ours, which a start-up file would replace.
    command.args(["--norc", "-i"]).env("PS1", "simulated host \\$ ");
    command
}

fn tell(session: &Session) -> io::Result<()> {
    writeln!(
        io::stdout(),
        "This is a simulated host. Try: gpuward list
  its files    {}
  its daemon   process {}, log {}/run/gpuwardd.log; kill it and it is started again
  its bus      export DBUS_SYSTEM_BUS_ADDRESS={}",
        session.root().display(),
        session.daemon_pid().unwrap_or_default(),
        session.root().display(),
        session.address()
    )
}

/// Between two looks at the command and the daemon.
const PAUSE: Duration = Duration::from_millis(50);

/// Signals to this program. Ctrl-C also reaches the command that runs, whose answer it is; a request to end is ours.
mod stop {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use tokio::signal::unix::{SignalKind, signal};

    static INTERRUPTED: AtomicBool = AtomicBool::new(false);
    static ASKED: AtomicBool = AtomicBool::new(false);

    pub fn interrupted() -> bool {
        INTERRUPTED.load(Ordering::Relaxed)
    }

    pub fn asked() -> bool {
        ASKED.load(Ordering::Relaxed)
    }

    /// Catches signals from now on.
    pub fn catch() -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let caught = [(SignalKind::interrupt(), &INTERRUPTED), (SignalKind::terminate(), &ASKED), (SignalKind::hangup(), &ASKED)];
        for (kind, flag) in caught {
            let _inside = runtime.enter();
            let mut signals = signal(kind)?;
            runtime.spawn(async move {
                while signals.recv().await.is_some() {
                    flag.store(true, Ordering::Relaxed);
                }
            });
        }
        thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(std::future::pending::<()>())).map(drop)
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
