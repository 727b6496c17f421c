//! libvirt's events: the only place that talks to its C interface.
//!
//! The `virt` crate wraps no callbacks. Callbacks run in the event loop's thread and only pass a hint on: whoever gets it asks
//! libvirt from a thread of its own, since a call made inside a callback would wait for the loop that it blocks.
#![allow(unsafe_code)] // callbacks into Rust need raw pointers; nothing else in this crate does

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::OnceLock;
use std::thread;

use uuid::Uuid;
use virt::connect::Connect;
use virt::error::{Error, clear_error_callback};
use virt::event::{event_register_default_impl, event_run_default_impl};
use virt_sys as sys;

type Changed = dyn Fn(Uuid) + Send + Sync;
type Closed = dyn Fn(&'static str) + Send + Sync;
type LifecycleCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, c_int, c_int, *mut c_void) -> c_int;
type GenericCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, *mut c_void);

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

/// Callbacks on one connection, taken off when dropped.
pub(super) struct Callbacks {
    connect: Connect,
    lifecycle: c_int,
}

impl Callbacks {
    /// Calls `changed` with the UUID of each domain that changes, and `closed` when the connection ends by itself.
    pub(super) fn register(connect: &Connect, changed: Box<Changed>, closed: Box<Closed>) -> Result<Self, Error> {
        let lifecycle = register_lifecycle(connect, changed)?;
        let callbacks = Self { connect: connect.clone(), lifecycle };
        register_close(connect, closed)?;
        Ok(callbacks)
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        // SAFETY: the connection lives in `self`, the id is one that it gave us, and the function is the one registered.
        unsafe {
            let connect = self.connect.as_ptr();
            sys::virConnectUnregisterCloseCallback(connect, Some(on_close));
            if sys::virConnectDomainEventDeregisterAny(connect, self.lifecycle) < 0 {
                // On a connection that was lost there is nothing left to take off.
                tracing::debug!("cannot take off libvirt callbacks: {}", Error::last_error().message());
            }
        }
    }
}

fn register_lifecycle(connect: &Connect, changed: Box<Changed>) -> Result<c_int, Error> {
    let opaque = Box::into_raw(Box::new(changed)).cast::<c_void>();
    // SAFETY: libvirt calls a callback registered for lifecycle events with the arguments of `LifecycleCallback`; its C interface
    // asks for the cast (VIR_DOMAIN_EVENT_CALLBACK). `opaque` is a `Box<Changed>`, which `free_changed` frees, once.
    let id = unsafe {
        let callback = mem::transmute::<LifecycleCallback, GenericCallback>(on_lifecycle);
        let event = sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE as c_int;
        let every_domain = ptr::null_mut();
        sys::virConnectDomainEventRegisterAny(connect.as_ptr(), every_domain, event, Some(callback), opaque, Some(free_changed))
    };
    if id >= 0 {
        return Ok(id);
    }
    let error = Error::last_error();
    // SAFETY: a registration that failed took nothing, so the box is still ours alone.
    unsafe { free_changed(opaque) };
    Err(error)
}

// A driver without a service behind it (the test driver) answers 0 and keeps nothing: the box then stays for good, one a connection.
fn register_close(connect: &Connect, closed: Box<Closed>) -> Result<(), Error> {
    let opaque = Box::into_raw(Box::new(closed)).cast::<c_void>();
    // SAFETY: `on_close` has the type asked for; `opaque` is a `Box<Closed>`, which `free_closed` frees, once.
    let result = unsafe { sys::virConnectRegisterCloseCallback(connect.as_ptr(), Some(on_close), opaque, Some(free_closed)) };
    if result >= 0 {
        return Ok(());
    }
    let error = Error::last_error();
    // SAFETY: a registration that failed took nothing, so the box is still ours alone.
    unsafe { free_closed(opaque) };
    Err(error)
}

unsafe extern "C" fn on_lifecycle(
    _: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _event: c_int,
    _detail: c_int,
    opaque: *mut c_void,
) -> c_int {
    let mut uuid = [0u8; sys::VIR_UUID_BUFLEN as usize];
    // SAFETY: libvirt keeps `domain` alive during the callback and writes VIR_UUID_BUFLEN bytes; `opaque` is the box registered.
    let changed = unsafe {
        if sys::virDomainGetUUID(domain, uuid.as_mut_ptr()) < 0 {
            return 0;
        }
        &*opaque.cast::<Box<Changed>>()
    };
    changed(Uuid::from_bytes(uuid));
    0
}

unsafe extern "C" fn on_close(_: sys::virConnectPtr, reason: c_int, opaque: *mut c_void) {
    // SAFETY: `opaque` is the box registered, freed only after the last call.
    let closed = unsafe { &*opaque.cast::<Box<Closed>>() };
    closed(match reason.cast_unsigned() {
        sys::VIR_CONNECT_CLOSE_REASON_EOF => "libvirt closed the connection (it was stopped or restarted)",
        sys::VIR_CONNECT_CLOSE_REASON_KEEPALIVE => "libvirt does not answer any more",
        sys::VIR_CONNECT_CLOSE_REASON_CLIENT => "the connection was closed here",
        _ => "the connection broke",
    });
}

unsafe extern "C" fn free_changed(opaque: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `register_lifecycle`, and called once.
    drop(unsafe { Box::from_raw(opaque.cast::<Box<Changed>>()) });
}

unsafe extern "C" fn free_closed(opaque: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `register_close`, and called once.
    drop(unsafe { Box::from_raw(opaque.cast::<Box<Closed>>()) });
}
