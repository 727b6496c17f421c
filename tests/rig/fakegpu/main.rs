//! `rig-fakegpu DIR COUNT`: makes `DIR/gpu0`, `DIR/gpu1`, … and serves an H100 on each, for QEMU's `vfio-user-pci`.
//!
//! What a host sees of the card without a driver is there: configuration space, BARs, resets and a few registers. The
//! firmware's mailbox and the confidential-computing knobs are not.

mod config_space;
mod device;
mod protocol;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, io, thread};

use device::H100;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [directory, count] = arguments.as_slice() else {
        eprintln!("usage: rig-fakegpu DIR COUNT");
        return ExitCode::from(2);
    };
    let Ok(count) = count.parse() else {
        eprintln!("not a count: {count}");
        return ExitCode::from(2);
    };
    match serve_all(PathBuf::from(directory), count) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rig-fakegpu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve_all(directory: PathBuf, count: u8) -> io::Result<()> {
    let mut servers = Vec::new();
    for index in 0..count {
        let name = format!("gpu{index}");
        let listener = UnixListener::bind(directory.join(&name))?;
        let mut device = H100::new(&name, index)?;
        servers.push(thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if let Err(error) = protocol::serve(&mut device, client) {
                    eprintln!("{name}: {error}");
                }
            }
        }));
    }
    for server in servers {
        server.join().map_err(|_| io::Error::other("a server thread panicked"))?;
    }
    Ok(())
}
