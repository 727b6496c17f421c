use super::*;

#[test]
fn sizes_are_bytes_or_have_a_unit() {
    for (text, size) in [("0", 0), ("4096", 4096), ("4KiB", 4 << 10), ("64GiB", 64 << 30), ("3 MiB", 3 << 20)] {
        assert_eq!(parse_size(text), Some(size), "{text}");
    }
    for text in ["", "GiB", "-1GiB", "+1GiB", "1.5GiB", "1gb", "1GB", "64 G", "99999999999999999999", "18446744073709551615GiB", "1 0"] {
        assert_eq!(parse_size(text), None, "{text}");
    }
}

#[test]
fn toml_that_is_none_says_where() {
    let failure = Node::from_toml("name = \"a\"\nvcpus =").unwrap_err();
    assert_eq!(failure.kind, ErrorKind::InvalidSpec);
    assert!(failure.message.contains("line 2"), "{failure}");
}

#[test]
fn a_fraction_is_refused_by_its_path() {
    let failure = Node::from_toml("[[device]]\ncount = 1.5").unwrap_err();
    assert!(failure.message.starts_with("device[0].count is a fraction"), "{failure}");
}
