//! What would have to change, computed from what was observed: pure.

use vfio::Function;

pub mod bundle;

/// Whether a function is bound to its VFIO driver because its override says so.
pub fn is_in_pool(function: &Function) -> bool {
    let driver = Some(&function.vfio_driver);
    function.driver.as_ref() == driver && function.driver_override.as_ref() == driver
}
