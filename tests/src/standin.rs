//! What libvirt's test driver lacks: a process for each running domain that holds the nodes of its devices.
//!
//! The process lies where a daemon looks for QEMU: its pid in `run/libvirt/qemu/<name>.pid`, `-uuid` in its command line, itself
//! below the simulated `proc`. Its console is a socket, `<name>.console` beside the pid file, that greets and then echoes. It outlives the daemon, as QEMU does. The driver's state is private to a connection and ends with
//! it, so a daemon that starts anew is given a connection that knows every domain whose process still lives.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use manager::libvirt::{self, Libvirt, Notice, Source};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use uuid::Uuid;
use virt::connect::Connect;
use virt::domain::Domain;

/// The word that makes a program of ours a stand-in: `<program> stand-in -name guest=<name> -console <socket> -uuid <uuid> <node>…`.
pub const WORD: &str = "stand-in";

/// Where libvirt keeps the pid file and the state of each running domain.
const DIR: &str = "run/libvirt/qemu";

const NAMESPACE: &str = "http://libvirt.org/schemas/domain/test/1.0";

/// Why there is no hypervisor.
#[derive(Debug, thiserror::Error)]
pub enum StandInError {
    /// Files of the simulated host.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The test driver.
    #[error("libvirt's test driver refuses")]
    Libvirt(#[from] virt::error::Error),
}

/// A running domain's process.
#[derive(Debug)]
struct Running {
    name: String,
    pid: Pid,
}

enum Happened {
    Connected,
    Changed(Uuid),
    Ended(Uuid),
}

/// Opens a connection to the test driver that knows every domain whose stand-in lives, and gives each domain that starts on it a
/// stand-in: `program`, run with [`WORD`]. Goes on in a thread until the process ends.
///
/// # Errors
/// A file cannot be written, or the driver refuses it.
pub fn open(root: &Path, program: &Path) -> Result<Connect, StandInError> {
    let running = living(root)?;
    let file = root.join("run/libvirt/test.xml");
    let node = node_xml(root, &running);
    fs::write(&file, node).map_err(|source| StandInError::File { path: file.clone(), source })?;
    libvirt::start_event_loop();
    let connect = Connect::open(Some(&format!("test://{}", file.display())))?;
    let (tell, told) = mpsc::channel();
    let mut hypervisor =
        Hypervisor { root: root.into(), program: program.into(), connect: connect.clone(), running: BTreeMap::new(), tell };
    for (uuid, running) in running {
        hypervisor.watch(uuid, running.pid, None);
        hypervisor.running.insert(uuid, running);
    }
    thread::spawn(move || hypervisor.run(told));
    Ok(connect)
}

/// Where the stand-ins of the host below `root` are, for a daemon.
pub fn source(root: &Path, connect: &Connect) -> Source {
    Source::Open(connect.clone(), root.join(DIR))
}

/// What a guest says on its console first.
pub const GREETING: &str = "simulated guest\r\n";

/// Runs as a stand-in: opens the nodes, says so, and serves its console until it is ended.
///
/// # Errors
/// A node or the console cannot be opened.
pub fn stand_in(console: &str, nodes: &[String]) -> io::Result<()> {
    let open = |node: &String| fs::File::options().read(true).write(true).open(node);
    let _held = nodes.iter().map(open).collect::<io::Result<Vec<_>>>()?;
    let console = UnixListener::bind(console)?;
    io::stdout().write_all(b"ready\n")?;
    loop {
        let (mut client, _) = console.accept()?;
        // A reader that leaves in the middle of a word is none of the guest's business.
        greet_and_echo(&mut client).unwrap_or_default();
    }
}

fn greet_and_echo(client: &mut UnixStream) -> io::Result<()> {
    client.write_all(GREETING.as_bytes())?;
    io::copy(&mut client.try_clone()?, client).map(drop)
}

/// Ends every stand-in of the host below `root`.
pub fn end_all(root: &Path) {
    for running in living(root).into_iter().flatten().map(|(_, running)| running) {
        end(running.pid);
    }
}

struct Hypervisor {
    root: PathBuf,
    program: PathBuf,
    connect: Connect,
    running: BTreeMap<Uuid, Running>,
    tell: Sender<Happened>,
}

impl Hypervisor {
    fn run(mut self, told: Receiver<Happened>) {
        let tell = self.tell.clone();
        let notify = move |notice| {
            let happened = match notice {
                Notice::Connected(_) => Happened::Connected,
                Notice::Changed(uuid) | Notice::Rebooted(uuid) => Happened::Changed(uuid),
                Notice::Lost { .. } => return,
            };
            tell.send(happened).unwrap_or_default(); // the receiver lives as long as the process
        };
        let _events = Libvirt::start(source(&self.root, &self.connect), std::sync::Arc::new(notify));
        for happened in told {
            match happened {
                // What started before events came.
                Happened::Connected => self.active().into_iter().for_each(|uuid| self.changed(uuid)),
                Happened::Changed(uuid) => self.changed(uuid),
                Happened::Ended(uuid) => self.ended(uuid),
            }
        }
    }

    fn active(&self) -> Vec<Uuid> {
        let domains = self.connect.list_all_domains(virt::sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE);
        domains.into_iter().flatten().filter_map(|domain| domain.uuid().ok()).collect()
    }

    fn changed(&mut self, uuid: Uuid) {
        let domain = self.connect.lookup_domain_by_uuid(uuid).ok().filter(|domain| domain.is_active() == Ok(true));
        match (domain, self.running.get(&uuid)) {
            (Some(domain), None) => {
                if let Err(error) = self.start(uuid, &domain) {
                    report(&format!("no stand-in for domain {uuid}: {error}"));
                    self.destroy(uuid);
                }
            }
            (None, Some(running)) => end(running.pid),
            (Some(_), Some(_)) | (None, None) => {}
        }
    }

    fn start(&mut self, uuid: Uuid, domain: &Domain) -> Result<(), Box<dyn std::error::Error>> {
        let (name, xml) = (domain.name()?, domain.xml_desc(0)?);
        let mut child = self.spawn(&name, uuid, &self.nodes(&xml)?)?;
        let mut word = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut word)?;
        }
        let pid = Pid::from_child(&child);
        if word.is_empty() {
            child.wait()?;
            return Err("it cannot open the nodes of its devices".into());
        }
        fs::write(self.root.join(DIR).join(format!("{name}.xml")), xml)?;
        let id = pid.as_raw_nonzero();
        symlink(format!("/proc/{id}"), self.root.join(format!("proc/{id}")))?;
        fs::write(self.root.join(DIR).join(format!("{name}.pid")), format!("{id}\n"))?;
        self.watch(uuid, pid, Some(child));
        self.running.insert(uuid, Running { name, pid });
        Ok(())
    }

    /// The group nodes of the devices in a domain's XML, each once.
    fn nodes(&self, xml: &str) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
        let group = |device| fs::read_link(self.root.join(format!("sys/bus/pci/devices/{device}/iommu_group")));
        let mut nodes = Vec::new();
        for device in libvirt::hostdevs(xml)? {
            let group = group(device)?;
            nodes.push(self.root.join("dev/vfio").join(group.file_name().unwrap_or_default()));
        }
        nodes.sort();
        nodes.dedup();
        Ok(nodes)
    }

    fn spawn(&self, name: &str, uuid: Uuid, nodes: &[PathBuf]) -> io::Result<Child> {
        Command::new(&self.program)
            .args([WORD, "-name", &format!("guest={name}"), "-console"])
            .arg(self.root.join(DIR).join(format!("{name}.console")))
            .args(["-uuid", &uuid.to_string()])
            .args(nodes)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C at the prompt of the simulated host is not meant for its machines.
            .process_group(0)
            .spawn()
    }

    fn watch(&self, uuid: Uuid, pid: Pid, child: Option<Child>) {
        let tell = self.tell.clone();
        thread::spawn(move || {
            // A process that cannot be opened has ended already.
            if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) {
                wait_for_end(&pidfd);
            }
            if let Some(mut child) = child {
                child.wait().map(drop).unwrap_or_default();
            }
            tell.send(Happened::Ended(uuid)).unwrap_or_default();
        });
    }

    // As libvirt at the end of QEMU's monitor: the pid file goes, then the domain is stopped.
    fn ended(&mut self, uuid: Uuid) {
        if let Some(running) = self.running.remove(&uuid) {
            forget(&self.root, &running.name, running.pid);
        }
        self.destroy(uuid);
    }

    fn destroy(&self, uuid: Uuid) {
        let domain = self.connect.lookup_domain_by_uuid(uuid).ok().filter(|domain| domain.is_active() == Ok(true));
        if let Some(error) = domain.and_then(|domain| domain.destroy().err()) {
            report(&format!("domain {uuid} cannot be destroyed: {}", error.message()));
        }
    }
}

/// The stand-ins that live, with the leftovers of the others removed.
fn living(root: &Path) -> Result<BTreeMap<Uuid, Running>, StandInError> {
    let dir = root.join(DIR);
    let failed = |source| StandInError::File { path: dir.clone(), source };
    fs::create_dir_all(&dir).map_err(failed)?;
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(&dir).map_err(failed)?.flatten() {
        let Some(name) = entry.file_name().to_str().and_then(|file| file.strip_suffix(".pid").map(str::to_owned)) else { continue };
        let text = match fs::read_to_string(entry.path()) {
            Ok(text) => text,
            // The connection before this one has seen it end.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        let Some(pid) = text.trim().parse().ok().and_then(Pid::from_raw) else { continue };
        match uuid_of(pid) {
            Some(uuid) => drop(found.insert(uuid, Running { name, pid })),
            None => forget(root, &name, pid),
        }
    }
    Ok(found)
}

/// The UUID in the command line of a process; `None` where it is none of ours, or has ended.
fn uuid_of(pid: Pid) -> Option<Uuid> {
    let line = fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
    let mut words = line.split('\0').skip_while(|word| *word != "-uuid");
    words.nth(1)?.parse().ok()
}

fn forget(root: &Path, name: &str, pid: Pid) {
    for file in [
        format!("{DIR}/{name}.console"),
        format!("{DIR}/{name}.pid"),
        format!("{DIR}/{name}.xml"),
        format!("proc/{}", pid.as_raw_nonzero()),
    ] {
        match fs::remove_file(root.join(&file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => report(&format!("{file} cannot be removed: {error}")),
            _ => {}
        }
    }
}

fn end(pid: Pid) {
    match kill_process(pid, Signal::TERM) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => report(&format!("stand-in {} cannot be ended: {error}", pid.as_raw_nonzero())),
    }
}

fn wait_for_end(pidfd: &OwnedFd) {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    while matches!(poll(&mut fds, None), Err(rustix::io::Errno::INTR)) {}
}

/// What the test driver is to know when the connection opens: the host, a network, a pool, and the domains that run.
fn node_xml(root: &Path, running: &BTreeMap<Uuid, Running>) -> String {
    let read = |file: String| fs::read_to_string(root.join(file)).unwrap_or_default();
    let cpus = read("sys/devices/system/cpu/online".into());
    let cpus = cpus.trim().rsplit('-').next().and_then(|last| last.parse::<u32>().ok()).unwrap_or(0) + 1;
    let memory = read("proc/meminfo".into());
    let memory = memory.split_whitespace().nth(1).unwrap_or("67108864").to_owned();
    let domains: String = running.values().map(|running| as_running(&read(format!("{DIR}/{}.xml", running.name)))).collect();
    format!(
        "<node>
  <cpu><nodes>1</nodes><sockets>1</sockets><cores>{cpus}</cores><threads>1</threads><active>{cpus}</active><mhz>2000</mhz><model>x86_64</model></cpu>
  <memory>{memory}</memory>
  <network><name>default</name><uuid>6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001</uuid><bridge name='virbr0'/><ip address='192.168.122.1' netmask='255.255.255.0'/></network>
{pools}{domains}</node>
",
        pools = pools()
    )
}

/// A volume of the simulated host: pool, name, format, and the path and format of what its header says backs it.
type Volume = (&'static str, &'static str, &'static str, Option<(&'static str, &'static str)>);

const VOLUMES: &[Volume] = &[
    ("tank", "a", "raw", None),
    ("tank", "train-1", "raw", None),
    ("tank", "train-2", "qcow2", Some(("/tank/base", "raw"))),
    ("tank", "base", "raw", None),
    ("acme-pool", "a", "raw", None),
    ("acme-pool", "overlay", "qcow2", Some(("/acme-pool/a", "raw"))),
    ("acme-pool", "of-the-host", "qcow2", Some(("/etc/shadow", "raw"))),
    ("acme-pool", "of-the-rival", "qcow2", Some(("/rival-pool/a", "raw"))),
    ("rival-pool", "a", "raw", None),
    ("shared-pool", "a", "raw", None),
];

fn pools() -> String {
    let mut pools: BTreeMap<&str, String> = BTreeMap::new();
    for (pool, name, format, backing) in VOLUMES {
        let backing = backing.map_or_else(String::new, |(path, format)| {
            format!("<backingStore><path>{path}</path><format type='{format}'/></backingStore>")
        });
        *pools.entry(pool).or_default() += &format!(
            "<volume type='file'><name>{name}</name><capacity>1073741824</capacity>\
             <target><path>/{pool}/{name}</path><format type='{format}'/></target>{backing}</volume>"
        );
    }
    let numbered = (0x5c7f_3f3f_1000_u64..).zip(pools);
    let pool = |(number, (pool, volumes)): (u64, (&str, String))| {
        format!(
            "  <pool type='dir'><name>{pool}</name><uuid>6b2f5c1e-2f6a-4d55-9f0e-{number:012x}</uuid><target><path>/{pool}</path></target>{volumes}</pool>\n"
        )
    };
    numbered.map(pool).collect()
}

/// The XML of a domain with the test driver's own elements: transient, and running from the start.
fn as_running(xml: &str) -> String {
    let xml = xml.replacen("<domain ", &format!("<domain xmlns:test='{NAMESPACE}' "), 1);
    xml.replacen("</domain>", "<test:transient/><test:runstate>1</test:runstate></domain>", 1)
}

// The simulated host is a program for developers; its daemon's log goes the same way.
fn report(text: &str) {
    eprintln!("gpuward-sim: {text}");
}
