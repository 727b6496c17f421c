use super::*;

fn of(xml: &str) -> Option<Volume> {
    read(xml, "tank".into(), "a".into(), "/tank/a".into())
}

#[test]
fn a_volume_says_its_format_and_what_backs_it() {
    let xml = "<volume type='file'><name>a</name><target><path>/tank/a</path><format type='qcow2'/></target>
        <backingStore><path>/tank/base</path><format type='raw'/></backingStore></volume>";
    let volume = of(xml).unwrap();
    assert_eq!((&*volume.kind, &*volume.format), ("file", "qcow2"));
    assert_eq!(volume.backing, Some(Backing { path: "/tank/base".into(), format: "raw".into() }));
    let alone = of("<volume type='block'><target><format type='raw'/></target></volume>").unwrap();
    assert_eq!((&*alone.kind, alone.backing), ("block", None));
}

#[test]
fn what_is_not_said_is_not_guessed() {
    let bare = of("<volume><backingStore/></volume>").unwrap();
    assert_eq!((&*bare.kind, &*bare.format), ("", ""));
    assert_eq!(bare.backing, Some(Backing { path: String::new(), format: String::new() }), "backed by what nobody can name");
    assert_eq!(of("<volume"), None);
}
