//! `gpuward tenant`, as an administrator and as an owner type it.
#![allow(clippy::expect_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use tests::person::Person;
use tests::polkit::Who;
use tests::session::Session;
use tests::typed::{self, done, ended, json};

const ACME: &str = r#"
format = 1
name = "acme"
owners = { users = ["daemon"], groups = ["root"] }
networks = ["acme-net"]
pools = ["tank"]
[quota]
gpus = 4
machines = 8
vcpus = "unlimited"
memory = "512GiB"
"#;

fn file(session: &Session, text: &str) -> String {
    let file = session.root().join("tenant.toml");
    fs::write(&file, text).expect("written");
    file.to_str().expect("UTF-8").to_owned()
}

fn dgx() -> Session {
    typed::session("dgx-h100", env!("CARGO_BIN_EXE_gpuward-sim"))
}

#[test]
fn a_tenant_is_applied_after_its_difference_was_shown() {
    let session = dgx();
    let acme = file(&session, ACME);
    let shown = done(&session, &["tenant", "apply", &acme, "--dry-run"]);
    assert!(shown.starts_with("tenant acme is new\n") && shown.contains("quota.memory       512GiB"), "{shown}");
    let (status, said) = ended(&session, &["tenant", "apply", &acme]);
    assert!(status == Some(2) && said.contains("--yes"), "{status:?} {said}");
    assert!(done(&session, &["tenant", "apply", &acme, "--yes"]).ends_with("tenant acme is made (job 2)\n"));
    assert_eq!(done(&session, &["tenant", "apply", &acme, "--yes"]), "nothing to do: tenant acme is as wished already\n");
    let more = file(&session, &ACME.replace("gpus = 4", "gpus = 6").replace("[\"acme-net\"]", "[]"));
    let changed = json(&session, &["tenant", "apply", &more, "--dry-run"]);
    assert_eq!(changed["changes"].as_array().expect("a list").len(), 2, "{changed}");
    assert_eq!(changed["changes"][1], serde_json::json!({ "key": "quota.gpus", "from": "4", "to": "6" }));
    let said = done(&session, &["tenant", "apply", &more, "--yes"]);
    assert!(said.contains("networks    acme-net → none\nquota.gpus  4 → 6\n"), "{said}");
    let list = done(&session, &["tenant", "list"]);
    assert!(list.contains("acme") && list.contains("0 of 6") && list.contains("daemon @root"), "{list}");
    assert!(done(&session, &["tenant", "show", "acme"]).contains("0 of 512GiB used"));
    done(&session, &["tenant", "remove", "acme"]);
    assert_eq!(ended(&session, &["tenant", "show", "acme"]).0, Some(3));
}

#[test]
fn what_is_wrong_with_a_file_is_said_before_anything_is_asked_for() {
    let session = dgx();
    let cases = [
        (ACME.replace("\"daemon\"", "\"no-such-user-here\""), 2, "this host knows no such user"),
        (ACME.replace("gpus", "gpuss"), 3, "quota.gpuss is no key of a specification"),
        (ACME.replace("format = 1", "format = "), 2, "line 2"),
    ];
    for (text, status, message) in cases {
        let (code, said) = ended(&session, &["tenant", "apply", &file(&session, &text), "--yes"]);
        assert!(code == Some(status) && said.contains(message), "{code:?} {said}");
    }
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn an_owner_lists_and_shows_what_is_theirs_and_is_refused_the_rest() {
    let session = dgx();
    fs::set_permissions(session.root(), PermissionsExt::from_mode(0o755)).expect("may");
    session.polkit.allow("org.gpuward.use-own", Who::Anybody);
    done(&session, &["tenant", "apply", &file(&session, ACME), "--yes"]);
    done(&session, &["tenant", "apply", &file(&session, &ACME.replace("acme", "rival").replace("\"daemon\"", "\"bin\"")), "--yes"]);
    // The checkout need not be theirs to read.
    let program = session.root().join("gpuward");
    fs::copy(tests::program::gpuward(), &program).expect("copied");
    let owner = Person::alone(1);
    let run = |arguments: &[&str]| {
        let mut command: Command = owner.command(session.command("setpriv"), program.to_str().expect("UTF-8"));
        let output = command.args(arguments).output().expect("runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
    };
    let (status, list) = run(&["tenant", "list"]);
    assert!(status == Some(0) && list.contains("acme") && !list.contains("rival"), "{list}");
    let spec = session.root().join("machine.toml");
    fs::write(&spec, "format = 1\nvcpus = 1\nmemory = '1GiB'\n[[disk]]\nvolume = 'tank/a'\n").expect("written");
    let made = run(&["machine", "create", "acme/a", "-f", spec.to_str().expect("UTF-8")]);
    assert_eq!(made.0, Some(0), "{}", made.1);
    assert!(run(&["machine", "list"]).1.contains("acme/a"));
    assert_eq!(run(&["machine", "show", "acme/a"]).0, Some(0));
    assert_eq!(run(&["tenant", "show", "rival"]).0, Some(4));
    assert_eq!(run(&["machine", "show", "rival/a"]).0, Some(4));
    assert_eq!(run(&["list"]).0, Some(4));
    assert_eq!(run(&["tenant", "remove", "acme"]).0, Some(4), "what an owner has is the administrator's to give");
}
