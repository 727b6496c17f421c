//! Resets: which of those the kernel offers may be used, and what a function is like afterwards.
//!
//! A reset stands between two tenants, so it has to clear what the first one left, to come back, and to reach nobody else. What the
//! kernel offers (`reset_method`, in the order it tries them) is not always that: [`choose`] leaves out the rest, each with its reason.

use std::fmt;
use std::str::FromStr;

use crate::{Function, Kind, PciAddress};

mod known;
mod run;

pub use run::{Report, ResetError, Step, check, look, reset};

/// A way to reset a function, as `reset_method` names it (`pci_reset_fn_methods` in `drivers/pci/pci.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// A quirk of the kernel, or of a module such as `vendor-reset`, for this model.
    DeviceSpecific,
    /// The firmware's `_RST`.
    Acpi,
    /// Function level reset.
    Flr,
    /// Function level reset of the Advanced Features capability.
    AfFlr,
    /// From D3hot to D0.
    Pm,
    /// Secondary bus reset, or of the slot.
    Bus,
    /// Secondary bus reset of a CXL port.
    CxlBus,
}

const METHODS: [(Method, &str); 7] = [
    (Method::DeviceSpecific, "device_specific"),
    (Method::Acpi, "acpi"),
    (Method::Flr, "flr"),
    (Method::AfFlr, "af_flr"),
    (Method::Pm, "pm"),
    (Method::Bus, "bus"),
    (Method::CxlBus, "cxl_bus"),
];

/// A word that is no reset method this version knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no reset method that is known here")]
pub struct UnknownMethod(String);

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(word: &str) -> Result<Self, UnknownMethod> {
        let found = METHODS.iter().find(|(_, name)| *name == word);
        found.map(|(method, _)| *method).ok_or_else(|| UnknownMethod(word.chars().take(32).collect()))
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = METHODS.iter().find(|(method, _)| method == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// How a function may be reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// By itself, by one of these, best first.
    Own(Vec<Method>),
    /// With everything on its bus, all of which moves with it.
    Bus {
        /// The bridge above.
        bridge: PciAddress,
    },
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(methods) => f.write_str(&methods.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")),
            Self::Bus { bridge } => write!(f, "its whole bus, below {bridge}"),
        }
    }
}

/// Why no reset of a function may be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no reset may be used: {}", if reasons.is_empty() { "the kernel offers none".to_owned() } else { reasons.join("; ") })]
pub struct NoReset {
    /// Each way that the kernel offers, with what speaks against it.
    pub reasons: Vec<String>,
}

/// How to reset a function of a bundle: by itself, or with the whole bus where everything on it is of the bundle.
///
/// The kernel's own `bus` method is for a function that is alone on its bus; a card with companions is reset at the bridge.
///
/// # Errors
/// What speaks against each way that the kernel offers.
pub fn way(function: &Function, bundle: &[PciAddress]) -> Result<Way, NoReset> {
    let none = match choose(function) {
        Ok(methods) => return Ok(Way::Own(methods)),
        Err(none) => none,
    };
    // Where it is alone there, the kernel would offer `bus` itself, if it may be used.
    let reaches_nobody_else = !function.on_same_bus.is_empty() && function.on_same_bus.iter().all(|other| bundle.contains(other));
    let may = function.kind != Kind::VirtualFunction && reaches_nobody_else && known::harm(function.ids, Method::Bus).is_none();
    function.bus_reset_at.filter(|_| may).map(|bridge| Way::Bus { bridge }).ok_or(none)
}

/// The ways that may be used to reset a function by itself, best first.
///
/// # Errors
/// What speaks against each way that the kernel offers.
pub fn choose(function: &Function) -> Result<Vec<Method>, NoReset> {
    let mut reasons = Vec::new();
    let mut methods = Vec::new();
    for name in &function.reset_methods {
        match name.parse().map_err(|error: UnknownMethod| error.to_string()).and_then(|method| may_use(function, method)) {
            Ok(method) => methods.push(method),
            Err(reason) => reasons.push(reason),
        }
    }
    methods.sort_by_key(|method| known::is_doubtful(function.ids, *method));
    if methods.is_empty() { Err(NoReset { reasons }) } else { Ok(methods) }
}

/// What `reset_method` of a function is to be while guests may have it, since they reset it too; `None` where it may stay.
///
/// Where no way is right, those that do harm are still taken away; an empty list takes all.
pub fn for_guests(function: &Function) -> Option<String> {
    let offered = &function.reset_methods;
    let harms = |name: &String| name.parse().is_ok_and(|method| known::harm(function.ids, method).is_some());
    let wanted: Vec<_> = match choose(function) {
        Ok(methods) => methods.iter().map(ToString::to_string).collect(),
        Err(_) => offered.iter().filter(|name| !harms(name)).cloned().collect(),
    };
    (wanted != *offered).then(|| wanted.join(" "))
}

fn may_use(function: &Function, method: Method) -> Result<Method, String> {
    if let Some(why) = known::harm(function.ids, method) {
        return Err(format!("{method}: {why}"));
    }
    let others = |function: &Function| function.on_same_bus.iter().map(PciAddress::to_string).collect::<Vec<_>>().join(", ");
    match method {
        Method::DeviceSpecific | Method::Flr => Ok(method),
        _ if function.kind == Kind::VirtualFunction => Err(format!("{method}: reaches beyond a virtual function")),
        Method::Acpi | Method::AfFlr => Ok(method),
        Method::Pm => Err("pm: leaves memory as it was".into()),
        // The kernel refuses it too (`pci_parent_bus_reset`), but goes on listing it: companions may come after the list was made.
        Method::Bus | Method::CxlBus if !function.on_same_bus.is_empty() => {
            Err(format!("{method}: {} on the same bus would be reset too", others(function)))
        }
        Method::Bus | Method::CxlBus => Ok(method),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Identity, Ids, Power};

    fn function(ids: (u16, u16), kind: Kind, methods: &str, beside: &[&str]) -> Function {
        let ids = Ids { vendor: ids.0, device: ids.1, ..Ids::default() };
        Function {
            address: "0000:41:00.0".parse().unwrap(),
            kind,
            ids,
            class: 0x030200,
            revision: 0,
            vendor_name: None,
            model_name: None,
            identity: Identity { slot: String::new(), ids, serial: None },
            bars: Vec::new(),
            link: None,
            numa_node: None,
            driver: None,
            driver_override: None,
            group: None,
            reset_methods: methods.split_whitespace().map(str::to_owned).collect(),
            on_same_bus: beside.iter().map(|address| address.parse().unwrap()).collect(),
            bus_reset_at: Some("0000:40:01.0".parse().unwrap()),
            power: Power::default(),
            sriov: None,
            physical_function: None,
            vgpu: None,
            boot_vga: false,
            bar_claimants: Vec::new(),
            vfio_device: None,
            vfio_driver: "vfio-pci".into(),
            locked: false,
            unreadable: Vec::new(),
        }
    }

    const H100: (u16, u16) = (0x10de, 0x2330);
    const GH200: (u16, u16) = (0x10de, 0x2342);
    const T4: (u16, u16) = (0x10de, 0x1eb8);
    const RTX_5090: (u16, u16) = (0x10de, 0x2b85);
    const RTX_PRO_6000: (u16, u16) = (0x10de, 0x2bb5);
    const POLARIS: (u16, u16) = (0x1002, 0x67df);
    const VEGA: (u16, u16) = (0x1002, 0x687f);
    const AUDIO: &[&str] = &["0000:41:00.1"];

    #[test]
    fn p32_p33_the_reset_is_chosen_by_rule() {
        let (gpu, vf) = (Kind::Gpu, Kind::VirtualFunction);
        let cases: [(&str, Function, Result<&str, &str>); 17] = [
            ("its own order is kept", function(H100, gpu, "flr bus", &[]), Ok("flr bus")),
            ("also one that an administrator made", function(H100, gpu, "bus flr", &[]), Ok("bus flr")),
            ("a bus is reset for one function alone", function(H100, gpu, "flr bus", AUDIO), Ok("flr")),
            ("and not at all for more", function(H100, gpu, "bus", AUDIO), Err("bus: 0000:41:00.1 on the same bus would be reset too")),
            ("power management clears nothing", function(H100, gpu, "pm", &[]), Err("pm: leaves memory as it was")),
            ("it is passed over", function(H100, gpu, "pm bus", &[]), Ok("bus")),
            ("a virtual function has its own reset alone", function(H100, vf, "flr bus pm", &[]), Ok("flr")),
            ("or none", function(H100, vf, "bus", &[]), Err("bus: reaches beyond a virtual function")),
            ("GH100 with a chip-to-chip link", function(GH200, gpu, "flr bus", &[]), Ok("flr")),
            ("a T4", function(T4, gpu, "flr bus", &[]), Ok("flr")),
            ("an RTX 5090", function(RTX_5090, gpu, "flr bus", &[]), Ok("bus")),
            ("an RTX 5090 with its audio", function(RTX_5090, gpu, "flr", AUDIO), Err("flr: does not come back from it")),
            ("an RTX PRO 6000, of which one report doubts it", function(RTX_PRO_6000, gpu, "flr bus", &[]), Ok("bus flr")),
            ("Polaris with vendor-reset", function(POLARIS, gpu, "device_specific bus", &[]), Ok("device_specific")),
            ("Vega without", function(VEGA, gpu, "bus", &[]), Err("bus: does not start again after it; vendor-reset knows how")),
            ("no method", function(H100, gpu, "", &[]), Err("the kernel offers none")),
            ("a method of a kernel to come", function(H100, gpu, "wish", &[]), Err("\"wish\" is no reset method that is known here")),
        ];
        for (what, function, expected) in cases {
            let chosen = choose(&function).map(|methods| methods.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
            let expected = expected.map(str::to_owned).map_err(|reason| format!("no reset may be used: {reason}"));
            assert_eq!(chosen.map_err(|error| error.to_string()), expected, "{what}");
        }
    }

    #[test]
    fn p32_what_harms_a_function_is_kept_from_its_guests_too() {
        let cases: [(&str, Function, Option<&str>); 6] = [
            ("nothing to take away", function(H100, Kind::Gpu, "flr bus", &[]), None),
            ("its bus is not its own", function(H100, Kind::Gpu, "flr bus", AUDIO), Some("flr")),
            ("its own reset kills it", function(RTX_5090, Kind::Gpu, "flr bus", &[]), Some("bus")),
            ("and there is no other", function(RTX_5090, Kind::Gpu, "flr", AUDIO), Some("")),
            ("a companion's ways clear nothing, and harm nobody", function(H100, Kind::Companion, "pm", AUDIO), None),
            ("no way at all", function(H100, Kind::Companion, "", AUDIO), None),
        ];
        for (what, function, expected) in cases {
            assert_eq!(for_guests(&function).as_deref(), expected, "{what}");
        }
    }

    #[test]
    fn p32_a_card_with_companions_is_reset_with_its_bus_where_that_is_all_on_it() {
        let (gpu, audio, other) = (Kind::Gpu, "0000:41:00.1".parse().unwrap(), "0000:41:00.2".parse().unwrap());
        let whole = "its whole bus, below 0000:40:01.0";
        let cases = [
            ("its own way is better", function(H100, gpu, "flr bus", AUDIO), vec![audio], Some("flr")),
            ("an RTX 5090 and its audio", function(RTX_5090, gpu, "flr bus", AUDIO), vec![audio], Some(whole)),
            ("the bundle may be larger", function(RTX_5090, gpu, "flr", AUDIO), vec![audio, other], Some(whole)),
            ("somebody else's function", function(RTX_5090, gpu, "flr", &["0000:41:00.1", "0000:41:00.2"]), vec![audio], None),
            ("a model that it harms", function(POLARIS, gpu, "bus", AUDIO), vec![audio], None),
            ("alone, and the kernel does not offer it", function(H100, gpu, "pm", &[]), vec![], None),
            ("a virtual function", function(H100, Kind::VirtualFunction, "bus", AUDIO), vec![audio], None),
        ];
        for (what, function, bundle, expected) in cases {
            assert_eq!(way(&function, &bundle).ok().map(|way| way.to_string()).as_deref(), expected, "{what}");
        }
        let below_an_older_kernel = Function { bus_reset_at: None, ..function(RTX_5090, gpu, "flr", AUDIO) };
        assert!(way(&below_an_older_kernel, &[audio]).is_err());
    }

    #[test]
    fn methods_are_named_as_the_kernel_names_them() {
        for (method, name) in METHODS {
            assert_eq!((name.parse(), method.to_string().as_str()), (Ok(method), name));
        }
        assert!("FLR".parse::<Method>().is_err());
    }
}
