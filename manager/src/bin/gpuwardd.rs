//! gpuwardd: see the library's `bin` modules.
fn main() {}
