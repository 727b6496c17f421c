//! libvirt's events: the only place that talks to its C interface.
//!
//! The `virt` crate wraps no callbacks. Callbacks run in the event loop's thread and only pass a hint on: whoever gets it asks
//! libvirt from a thread of its own, since a call made inside a callback would wait for the loop that it blocks.
#![allow(unsafe_code)] // callbacks into Rust need raw pointers; nothing else in this crate does

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use uuid::Uuid;
use virt::connect::Connect;
use virt::error::{Error, clear_error_callback};
use virt::event::{event_register_default_impl, event_run_default_impl};
use virt_sys as sys;

// libvirt's C interface has a type for each event, and asks for a cast to the last one (VIR_DOMAIN_EVENT_CALLBACK).
type LifecycleCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, c_int, c_int, *mut c_void) -> c_int;
type AgentCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, c_int, c_int, *mut c_void);
type DeviceCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, *const c_char, *mut c_void);
type GenericCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, *mut c_void);

/// Who listens to a connection.
pub(super) struct Listener {
    /// Called with the UUID of each domain that changes.
    pub changed: Box<dyn Fn(Uuid) + Send + Sync>,
    /// Called with the UUID of each domain whose guest was reset.
    pub rebooted: Box<dyn Fn(Uuid) + Send + Sync>,
    /// Called when the connection ends by itself.
    pub closed: Box<dyn Fn(&'static str) + Send + Sync>,
}

/// Listeners by the address of their connection. libvirt takes a callback once a connection, and a connection can have several
/// listeners; callbacks are given that address and no pointer of ours, so nothing is ever freed under them.
static LISTENERS: Mutex<BTreeMap<usize, Vec<Arc<Listener>>>> = Mutex::new(BTreeMap::new());

// Never held while libvirt is called: the event loop would wait for it. The map is changed by single calls.
fn listeners() -> MutexGuard<'static, BTreeMap<usize, Vec<Arc<Listener>>>> {
    LISTENERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts libvirt's event loop, once a process. Must come before the first connection is opened.
///
/// It waits in `poll` without a time limit, so it costs nothing while nothing happens.
pub fn start_event_loop() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        // By default libvirt prints every error to stderr, also those that are answers to us (no such domain).
        clear_error_callback();
        if let Err(error) = event_register_default_impl() {
            tracing::error!("no events from libvirt: {}", error.message());
            return;
        }
        let turn = || {
            while let Ok(()) = event_run_default_impl() {}
            tracing::error!("no events from libvirt any more: {}", Error::last_error().message());
        };
        if let Err(error) = thread::Builder::new().name("virt-events".into()).spawn(turn) {
            tracing::error!("no events from libvirt: {error}");
        }
    });
}

/// A listener on a connection, until it is dropped.
pub(super) struct Callbacks {
    connect: Connect,
    listener: Arc<Listener>,
    /// What is libvirt's to take off; empty where another listener had them put on.
    registered: Vec<c_int>,
}

impl Callbacks {
    pub(super) fn register(connect: &Connect, listener: Listener) -> Result<Self, Error> {
        let (key, listener) = (key(connect), Arc::new(listener));
        let is_first = {
            let mut listeners = listeners();
            let of_connection = listeners.entry(key).or_default();
            of_connection.push(listener.clone());
            of_connection.len() == 1
        };
        // From here on dropping it takes the listener off again.
        let mut callbacks = Self { connect: connect.clone(), listener, registered: Vec::new() };
        if is_first {
            register(connect, key, &mut callbacks.registered)?;
        }
        Ok(callbacks)
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        let key = key(&self.connect);
        {
            let mut listeners = listeners();
            let of_connection = listeners.entry(key).or_default();
            of_connection.retain(|listener| !Arc::ptr_eq(listener, &self.listener));
            if of_connection.is_empty() {
                listeners.remove(&key);
            }
        }
        if self.registered.is_empty() {
            return;
        }
        // SAFETY: the connection lives in `self`, the ids are ones that it gave us, and the function is the one registered.
        unsafe {
            let connect = self.connect.as_ptr();
            sys::virConnectUnregisterCloseCallback(connect, Some(on_close));
            for id in &self.registered {
                if sys::virConnectDomainEventDeregisterAny(connect, *id) < 0 {
                    // On a connection that was lost there is nothing left to take off.
                    tracing::debug!("cannot take off libvirt callbacks: {}", Error::last_error().message());
                }
            }
        }
    }
}

fn key(connect: &Connect) -> usize {
    // SAFETY: the pointer is looked at as a number and never followed.
    unsafe { connect.as_ptr() }.addr()
}

// What was registered is in `registered` also where a later one fails: the caller takes it off.
fn register(connect: &Connect, key: usize, registered: &mut Vec<c_int>) -> Result<(), Error> {
    let opaque = ptr::without_provenance_mut(key);
    // SAFETY: libvirt calls a callback with the arguments of the event that it is registered for, which is the type that each has
    // before the cast. `opaque` is a number that nobody follows or frees. The same is true of the close callback, which has the
    // type asked for; a driver without a service behind it accepts it and never calls it.
    unsafe {
        let connect = connect.as_ptr();
        let events = [
            (sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE, mem::transmute::<LifecycleCallback, GenericCallback>(on_lifecycle)),
            (sys::VIR_DOMAIN_EVENT_ID_REBOOT, on_reboot),
            (sys::VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE, mem::transmute::<AgentCallback, GenericCallback>(on_agent)),
            (sys::VIR_DOMAIN_EVENT_ID_DEVICE_ADDED, mem::transmute::<DeviceCallback, GenericCallback>(on_device)),
            (sys::VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, mem::transmute::<DeviceCallback, GenericCallback>(on_device)),
        ];
        for (event, callback) in events {
            let every_domain = ptr::null_mut();
            let id = sys::virConnectDomainEventRegisterAny(connect, every_domain, event as c_int, Some(callback), opaque, None);
            if id < 0 {
                return Err(Error::last_error());
            }
            registered.push(id);
        }
        if sys::virConnectRegisterCloseCallback(connect, Some(on_close), opaque, None) < 0 {
            return Err(Error::last_error());
        }
    }
    Ok(())
}

unsafe extern "C" fn on_lifecycle(
    _: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _event: c_int,
    _detail: c_int,
    opaque: *mut c_void,
) -> c_int {
    tell_changed(domain, opaque);
    0
}

unsafe extern "C" fn on_agent(_: sys::virConnectPtr, domain: sys::virDomainPtr, _state: c_int, _reason: c_int, opaque: *mut c_void) {
    tell_changed(domain, opaque);
}

unsafe extern "C" fn on_device(_: sys::virConnectPtr, domain: sys::virDomainPtr, _alias: *const c_char, opaque: *mut c_void) {
    tell_changed(domain, opaque);
}

unsafe extern "C" fn on_reboot(_: sys::virConnectPtr, domain: sys::virDomainPtr, opaque: *mut c_void) {
    let Some(uuid) = uuid_of(domain) else { return };
    of_connection(opaque).iter().for_each(|listener| (listener.rebooted)(uuid));
}

fn tell_changed(domain: sys::virDomainPtr, opaque: *mut c_void) {
    let Some(uuid) = uuid_of(domain) else { return };
    of_connection(opaque).iter().for_each(|listener| (listener.changed)(uuid));
}

fn uuid_of(domain: sys::virDomainPtr) -> Option<Uuid> {
    let mut uuid = [0u8; sys::VIR_UUID_BUFLEN as usize];
    // SAFETY: libvirt keeps `domain` alive during the callback that this is called from, and writes VIR_UUID_BUFLEN bytes.
    let is_known = unsafe { sys::virDomainGetUUID(domain, uuid.as_mut_ptr()) } >= 0;
    is_known.then(|| Uuid::from_bytes(uuid))
}

unsafe extern "C" fn on_close(_: sys::virConnectPtr, reason: c_int, opaque: *mut c_void) {
    let reason = match reason.cast_unsigned() {
        sys::VIR_CONNECT_CLOSE_REASON_EOF => "libvirt closed the connection (it was stopped or restarted)",
        sys::VIR_CONNECT_CLOSE_REASON_KEEPALIVE => "libvirt does not answer any more",
        sys::VIR_CONNECT_CLOSE_REASON_CLIENT => "the connection was closed here",
        _ => "the connection broke",
    };
    for listener in of_connection(opaque) {
        (listener.closed)(reason);
    }
}

fn of_connection(opaque: *mut c_void) -> Vec<Arc<Listener>> {
    listeners().get(&opaque.addr()).cloned().unwrap_or_default()
}
