use vfio::{Ids, PciAddress};

use super::*;
use crate::plan::tests::{at, function};

fn wish(kind: WishKind, count: u32) -> Wish {
    Wish { kind, count, model: None, identity: None, same_numa: true }
}

/// GPUs at 41 to 44, the first two on node 0 and the others on node 1, and a virtual function at 50.
fn host() -> (Inventory, Vec<Free>) {
    let addresses = ["0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0"];
    let mut devices: BTreeMap<PciAddress, Function> = BTreeMap::new();
    for (index, address) in (0..).zip(addresses) {
        let mut gpu = function(address, Kind::Gpu);
        gpu.numa_node = Some(index / 2);
        devices.insert(gpu.address, gpu);
    }
    devices.insert(at("0000:50:00.4"), function("0000:50:00.4", Kind::VirtualFunction));
    let free = devices.keys().map(|main| Free { devices: vec![*main], main: *main, on_demand: false }).collect();
    (Inventory { devices, ..Inventory::default() }, free)
}

fn placed(wishes: &[Wish], free: &[Free], inventory: &Inventory) -> Result<Vec<String>, Unmet> {
    place(wishes, free, inventory).map(|bundles| bundles.iter().map(|bundle| bundle.main.to_string()).collect())
}

#[test]
fn one_wish_takes_the_first_that_fits() {
    let (inventory, free) = host();
    assert_eq!(placed(&[wish(WishKind::Gpu, 1)], &free, &inventory).unwrap(), ["0000:41:00.0"]);
    assert_eq!(placed(&[wish(WishKind::Vf, 1)], &free, &inventory).unwrap(), ["0000:50:00.4"]);
}

#[test]
fn two_on_one_node_leave_the_node_with_more_whole() {
    let (inventory, mut free) = host();
    free.remove(0);
    assert_eq!(placed(&[wish(WishKind::Gpu, 2)], &free, &inventory).unwrap(), ["0000:43:00.0", "0000:44:00.0"]);
    assert_eq!(placed(&[wish(WishKind::Gpu, 3)], &free, &inventory).unwrap_err(), Unmet { wish: 0, free: 3 });
    let anywhere = Wish { same_numa: false, ..wish(WishKind::Gpu, 3) };
    assert_eq!(placed(&[anywhere], &free, &inventory).unwrap().len(), 3);
}

#[test]
fn a_wish_for_any_leaves_the_named_one_to_the_wish_that_names_it() {
    let (inventory, free) = host();
    let named = Wish { identity: Some("0000:41:00.0".into()), ..wish(WishKind::Gpu, 1) };
    assert_eq!(placed(&[wish(WishKind::Gpu, 1), named], &free, &inventory).unwrap(), ["0000:42:00.0", "0000:41:00.0"]);
}

#[test]
fn an_identity_names_a_device_too() {
    let (inventory, free) = host();
    let identity = inventory.devices[&at("0000:44:00.0")].identity.to_string();
    let named = Wish { identity: Some(identity), ..wish(WishKind::Gpu, 1) };
    assert_eq!(placed(&[named], &free, &inventory).unwrap(), ["0000:44:00.0"]);
}

#[test]
fn another_model_does_not_fit() {
    let (inventory, free) = host();
    let other = Wish { model: Some(Ids { vendor: 0x10de, device: 0x25b6, ..Ids::default() }), ..wish(WishKind::Gpu, 1) };
    assert_eq!(placed(&[other], &free, &inventory).unwrap_err(), Unmet { wish: 0, free: 0 });
}

#[test]
fn the_pool_comes_before_the_host() {
    let (inventory, mut free) = host();
    free[0].on_demand = true;
    assert_eq!(placed(&[wish(WishKind::Gpu, 1)], &free, &inventory).unwrap(), ["0000:42:00.0"]);
    assert_eq!(placed(&[wish(WishKind::Gpu, 2)], &free, &inventory).unwrap(), ["0000:43:00.0", "0000:44:00.0"]);
}

#[test]
fn two_wishes_never_share_a_bundle() {
    let (inventory, free) = host();
    assert_eq!(placed(&[wish(WishKind::Gpu, 2), wish(WishKind::Gpu, 2)], &free, &inventory).unwrap().len(), 4);
    let third = [wish(WishKind::Gpu, 2), wish(WishKind::Gpu, 2), wish(WishKind::Gpu, 1)];
    assert_eq!(placed(&third, &free, &inventory).unwrap_err(), Unmet { wish: 2, free: 0 });
}
