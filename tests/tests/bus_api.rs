//! The interface as it is: introspection of a live object of each kind, guarded by a golden file, and `docs/dbus-api.md` made of it.
//!
//! `UPDATE_GOLDEN=1` writes both anew. A change of the golden file is a change of the interface: the change log says whether it adds
//! or breaks.
#![allow(clippy::expect_used)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

use roxmltree::Node;
use tests::operated::Operated;

/// In the order of the documentation.
const INTERFACES: [&str; 9] = ["Manager", "Device", "Sriov", "VirtualFunction", "IommuGroup", "Claim", "Tenant", "Machine", "Job"];

/// What is true of all of it.
const PREFACE: &str = include_str!("../golden/dbus-api-preface.md");

fn compare(file: &str, found: &str) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file);
    if env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&file, found).expect("written");
    }
    let expected = fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(found, expected, "{}; UPDATE_GOLDEN=1 writes it anew", file.display());
}

/// The introspection of each interface, of a host that has all of them.
fn interfaces() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (name, gpu) in [("dgx-h100", Some("0000:1b:00.0")), ("l40s-vgpu", None)] {
        let host = Operated::start(name, Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("the daemon comes up");
        if let Some(gpu) = gpu {
            host.start_machine(gpu).expect("started");
        }
        let answer = host.client.wait(host.client.bus().call_method(
            Some("org.gpuward1"),
            "/org/gpuward1",
            Some("org.freedesktop.DBus.Introspectable"),
            "Introspect",
            &(),
        ));
        let xml: String = answer.expect("answered").body().deserialize().expect("text");
        for (interface, text) in of_document(&xml) {
            found.entry(interface).or_insert(text);
        }
    }
    found
}

// The text itself, not the tree: it is what clients get. Indented as the outermost would be.
fn of_document(xml: &str) -> Vec<(String, String)> {
    let document = parse(xml);
    let ours = document.descendants().filter(|node| node.has_tag_name("interface"));
    let ours = ours.filter_map(|node| {
        let name = node.attribute("name")?.strip_prefix("org.gpuward1.")?;
        let start = node.range().start;
        let indent = xml[..start].len() - xml[..start].trim_end_matches(' ').len();
        let lines = xml[node.range()].lines().enumerate();
        let lines = lines.map(|(number, line)| if number == 0 { line } else { line.get(indent..).unwrap_or_else(|| line.trim_start()) });
        Some((name.to_owned(), lines.collect::<Vec<_>>().join("\n")))
    });
    ours.collect()
}

fn parse(xml: &str) -> roxmltree::Document<'_> {
    roxmltree::Document::parse_with_options(xml, roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() }).expect("XML")
}

#[test]
fn the_interface_is_what_its_golden_file_and_its_documentation_say() {
    let interfaces = interfaces();
    let mut golden = String::from("<node>\n");
    let mut documentation = PREFACE.to_owned();
    for name in INTERFACES {
        let xml = interfaces.get(name).unwrap_or_else(|| panic!("no object has {name}"));
        writeln!(golden, "{xml}").expect("into memory");
        documentation.push_str(&document(name, xml));
    }
    golden.push_str("</node>\n");
    assert_eq!(interfaces.len(), INTERFACES.len(), "{:?}", interfaces.keys());
    assert!(golden.matches("<property").count() == golden.matches("access=\"read\"").count(), "no property can be written");
    compare("../manager/data/org.gpuward1.xml", &golden);
    compare("../docs/dbus-api.md", &documentation);
}

fn document(name: &str, xml: &str) -> String {
    let document = parse(xml);
    let mut text = format!("\n## org.gpuward1.{name}\n");
    for (kind, title) in [("property", "Properties"), ("method", "Methods"), ("signal", "Signals")] {
        let members: Vec<_> = document.root_element().children().filter(|node| node.has_tag_name(kind)).collect();
        if members.is_empty() {
            continue;
        }
        write!(text, "\n### {title}\n\n").expect("into memory");
        for member in members {
            describe(&mut text, member);
        }
    }
    text
}

fn describe(text: &mut String, member: Node<'_, '_>) {
    let name = member.attribute("name").unwrap_or_default();
    let head = match member.tag_name().name() {
        "property" => format!("{name} `{}`{}", member.attribute("type").unwrap_or_default(), announcement(member)),
        "signal" => format!("{name}({})", arguments(member, None)),
        _ => match arguments(member, Some("out")) {
            answer if answer.is_empty() => format!("{name}({})", arguments(member, Some("in"))),
            answer => format!("{name}({}) → {answer}", arguments(member, Some("in"))),
        },
    };
    writeln!(text, "- **{head}**").expect("into memory");
    for line in comment(member).lines() {
        writeln!(text, "{}", format!("  {line}").trim_end()).expect("into memory");
    }
}

fn announcement(property: Node<'_, '_>) -> &'static str {
    const CHANGES: &str = "org.freedesktop.DBus.Property.EmitsChangedSignal";
    let annotation = property.children().find(|node| node.attribute("name") == Some(CHANGES));
    match annotation.and_then(|node| node.attribute("value")) {
        Some("const") => ", never changes",
        Some("false") => ", changes unannounced",
        _ => "",
    }
}

fn arguments(member: Node<'_, '_>, direction: Option<&str>) -> String {
    let arguments = member.children().filter(|node| node.has_tag_name("arg") && node.attribute("direction") == direction);
    let shown = arguments.map(|node| format!("{} `{}`", node.attribute("name").unwrap_or("_"), node.attribute("type").unwrap_or_default()));
    shown.collect::<Vec<_>>().join(", ")
}

// The comment right before a member is about it.
fn comment(member: Node<'_, '_>) -> String {
    let before = member.prev_siblings().skip(1).find(|node| !node.is_text());
    let comment = before.filter(Node::is_comment).and_then(|node| node.text()).unwrap_or_default();
    let lines: Vec<_> = comment.trim().lines().map(str::trim).collect();
    lines.join("\n")
}
