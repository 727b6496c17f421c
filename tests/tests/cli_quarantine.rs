//! Resets, quarantine and histories as a person meets them: the command, the real daemon, a simulated host.
#![allow(clippy::expect_used)]

use tests::session::Session;
use tests::simhost::{Left, SimHost, SimRoot};
use tests::typed::{self, done, ended, json};

const GPU: &str = "0000:1b:00.0";
const OTHER: &str = "0000:43:00.0";

fn dgx() -> Session {
    typed::session("dgx-h100", env!("CARGO_BIN_EXE_gpuward-sim"))
}

/// The host that the daemon manages, to be tampered with.
fn tamper(session: &Session) -> SimHost {
    SimHost::at(SimRoot::Kept(session.root().to_owned()))
}

#[test]
fn a_device_is_reset_and_its_history_has_each_step() {
    let session = dgx();
    done(&session, &["assign", GPU]);
    let text = done(&session, &["reset", "1b:00.0"]);
    assert!(text.starts_with("0000:1b:00.0 was reset and answers (job "), "{text}");
    let history = done(&session, &["history", GPU]);
    let lines: Vec<_> = history.lines().collect();
    assert!(lines[0].contains("Z  sanitised           reset (flr), answers, regions in place"), "{history}");
    assert!(lines[1].contains("address 0000:1b:00.0, job "), "{history}");
    assert_eq!(lines[5].split(':').next(), Some("    reset"), "{history}");
    assert!(history.contains("assigned            taken from nvidia"), "{history}");
    let told = json(&session, &["history", GPU, "--limit", "1"]);
    assert_eq!(told["entries"][0]["kind"], "sanitised");
    let before = told["entries"][0]["time"].to_string();
    let older = json(&session, &["history", GPU, "--before", &before]);
    let times: Vec<_> = older["entries"].as_array().expect("a list").iter().filter_map(|entry| entry["time"].as_u64()).collect();
    assert!(times.iter().all(|time| Some(*time) < told["entries"][0]["time"].as_u64()), "{times:?}");
    let (status, why) = ended(&session, &["reset", OTHER]);
    assert!(status == Some(3) && why.contains("remedy `gpuward assign 0000:43:00.0` takes it into the pool"), "{status:?} {why}");
    assert_eq!(ended(&session, &["history", GPU, "--limit", "0"]).0, Some(3));
}

#[test]
fn p32_a_device_that_does_not_come_back_is_listed_with_the_reason_and_cleared_when_it_answers() {
    let session = dgx();
    done(&session, &["assign", GPU]);
    assert_eq!(json(&session, &["quarantine", "list"])["devices"], serde_json::json!([]));
    tamper(&session).after_reset(GPU, Left::Silent).expect("said");
    let (status, why) = ended(&session, &["reset", GPU]);
    assert_eq!(status, Some(1));
    assert!(why.contains("does not answer: configuration space begins with ffffffff"), "{why}");
    let list = done(&session, &["quarantine", "list"]);
    let line = list.lines().nth(1).unwrap_or_default();
    assert!(line.starts_with(GPU) && line.contains("quarantined  0000:1b:00.0 does not answer"), "{list}");
    assert_eq!(json(&session, &["quarantine", "list"])["devices"][0]["address"], GPU);
    assert_eq!(ended(&session, &["quarantine", "clear", GPU]).0, Some(1), "it still does not answer");
    let (status, why) = ended(&session, &["quarantine", "recover", GPU]);
    assert!(status == Some(3) && why.contains("policy.remove-rescan is false"), "{status:?} {why}");
    tamper(&session).answer_again(GPU).expect("healed");
    tamper(&session).after_reset(GPU, Left::Whole).expect("said");
    let text = done(&session, &["quarantine", "clear", GPU]);
    assert!(text.starts_with("0000:1b:00.0 answers and is out of quarantine (job "), "{text}");
    assert_eq!(json(&session, &["show", GPU])["state"], "free");
}
