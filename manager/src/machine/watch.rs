//! One thread that waits for the end of every machine's process. It sleeps until one ends: no wake-ups while nothing happens.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::Process;
use crate::id::MachineId;

/// What is told of an end.
pub type Ended = Box<dyn Fn(MachineId) + Send>;

/// The processes watched. The thread ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    processes: Mutex<Option<BTreeMap<MachineId, Arc<OwnedFd>>>>,
    changed: OwnedFd,
}

impl Watch {
    /// Starts the thread; `ended` is called from it, once for each process that ended.
    ///
    /// # Errors
    /// No thread or no descriptor for it.
    pub fn start(ended: Ended) -> io::Result<Self> {
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { processes: Mutex::new(Some(BTreeMap::new())), changed });
        let watched = shared.clone();
        thread::Builder::new().name("pidfds".into()).spawn(move || watched.run(&ended))?;
        Ok(Self { shared })
    }

    /// Watches the process of `machine`, in place of one watched before.
    pub fn add(&self, machine: MachineId, process: &Process) {
        if let Some(processes) = &mut *self.shared.lock() {
            processes.insert(machine, process.pidfd().clone());
        }
        self.shared.wake();
    }

    /// Watches it no more.
    pub fn remove(&self, machine: MachineId) {
        if let Some(processes) = &mut *self.shared.lock() {
            processes.remove(&machine);
        }
        self.shared.wake();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.shared.lock() = None;
        self.shared.wake();
    }
}

impl Shared {
    fn run(&self, ended: &Ended) {
        while let Some(watched) = self.watched() {
            match self.wait(&watched) {
                Ok(dead) => dead.into_iter().for_each(|(machine, pidfd)| {
                    if self.forget(machine, &pidfd) {
                        ended(machine);
                    }
                }),
                Err(error) => {
                    tracing::error!("cannot wait for machines' processes: {error}");
                    return;
                }
            }
        }
    }

    // Of its own, so that the lock is not held while waiting.
    fn watched(&self) -> Option<BTreeMap<MachineId, Arc<OwnedFd>>> {
        self.lock().clone()
    }

    fn wait(&self, watched: &BTreeMap<MachineId, Arc<OwnedFd>>) -> io::Result<Vec<(MachineId, Arc<OwnedFd>)>> {
        let fds = std::iter::once(self.changed.as_fd()).chain(watched.values().map(|pidfd| pidfd.as_fd()));
        let mut polled: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.clear();
        let dead = watched.iter().zip(&polled[1..]).filter(|(_, polled)| !polled.revents().is_empty());
        Ok(dead.map(|((machine, pidfd), _)| (*machine, pidfd.clone())).collect())
    }

    // A process may have been replaced (libvirt makes QEMU anew) while the old one's end was on its way.
    fn forget(&self, machine: MachineId, pidfd: &Arc<OwnedFd>) -> bool {
        let mut processes = self.lock();
        let Some(processes) = &mut *processes else { return false };
        let is_current = processes.get(&machine).is_some_and(|current| Arc::ptr_eq(current, pidfd));
        if is_current {
            processes.remove(&machine);
        }
        is_current
    }

    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.changed, &1u64.to_ne_bytes()) {
            tracing::error!("cannot wake the thread that watches processes: {error}");
        }
    }

    // Empty already: nothing changed, a process ended.
    fn clear(&self) {
        match rustix::io::read(&self.changed, &mut [0; 8]) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => tracing::error!("cannot read an event: {error}"),
        }
    }

    // The map is changed by single calls: a panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, Option<BTreeMap<MachineId, Arc<OwnedFd>>>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn child() -> (Child, Process) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of_child(child.id());
        (child, process)
    }

    #[test]
    fn the_end_of_each_process_is_told_once() {
        let (sender, ends) = mpsc::channel();
        let watch = Watch::start(Box::new(move |machine| sender.send(machine).unwrap())).unwrap();
        let machines: Vec<_> = (0..3).map(|_| (MachineId::random(), child())).collect();
        machines.iter().for_each(|(machine, (_, process))| watch.add(*machine, process));
        for (machine, (mut child, _)) in machines {
            assert_eq!(ends.try_recv(), Err(mpsc::TryRecvError::Empty));
            child.kill().unwrap();
            assert_eq!(ends.recv_timeout(Duration::from_secs(5)), Ok(machine));
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_was_replaced_or_removed_ends_untold() {
        let (sender, ends) = mpsc::channel();
        let watch = Watch::start(Box::new(move |machine| sender.send(machine).unwrap())).unwrap();
        let (machine, other) = (MachineId::random(), MachineId::random());
        let ((mut old, first), (mut new, second)) = (child(), child());
        watch.add(machine, &first);
        watch.add(machine, &second);
        watch.add(other, &first);
        watch.remove(other);
        old.kill().unwrap();
        old.wait().unwrap();
        assert!(ends.recv_timeout(Duration::from_millis(100)).is_err());
        new.kill().unwrap();
        new.wait().unwrap();
        assert_eq!(ends.recv_timeout(Duration::from_secs(5)), Ok(machine));
    }
}
