//! `gpuward plan`, `assign` and `release`.

use serde::Serialize;
use vfio::PciAddress;
use zbus::Variant;

use super::args::{Force, PlanCommand, Request, VfCount};
use super::follow::follow;
use super::{Context, Stop};
use crate::client::{ManagerProxy, Options, Record, failure_in};
use crate::failure::{ErrorKind, Failure};

/// What is wished for devices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wish {
    /// Into the pool.
    Assign(Force),
    /// Back to the host.
    Release,
    /// So many virtual functions.
    Vfs(u16),
}

impl Wish {
    fn word(self) -> &'static str {
        match self {
            Self::Assign(_) => "assign",
            Self::Release => "release",
            Self::Vfs(_) => "vfs",
        }
    }

    fn goals(self, devices: &[PciAddress]) -> Vec<Options<'static>> {
        let goal = |device: &PciAddress| {
            let mut goal = Options::from([("goal", Variant::from(self.word())), ("device", Variant::from(device.to_string()))]);
            match self {
                Self::Assign(Force { force: true }) => drop(goal.insert("force", Variant::from(true))),
                Self::Vfs(count) => drop(goal.insert("count", Variant::from(u32::from(count)))),
                Self::Assign(Force { force: false }) | Self::Release => {}
            }
            goal
        };
        devices.iter().map(goal).collect()
    }
}

/// `gpuward assign` and `gpuward release`: one job, whatever the number of devices.
pub(super) fn apply(context: &mut Context, wish: Wish, devices: &[PciAddress], request: &Request) -> Result<(), Stop> {
    let goals = wish.goals(devices);
    let options = request.options();
    let followed = follow(context, request, |bus| async move { ManagerProxy::new(&bus).await?.apply(goals, options).await })?;
    let are = if devices.len() == 1 { "is" } else { "are" };
    let text = match wish {
        Wish::Assign(_) => format!("{} {are} in the pool", names(devices)),
        Wish::Release => format!("{} {are} the host's again", names(devices)),
        Wish::Vfs(count) => format!("{} has {count} virtual functions", names(devices)),
    };
    followed.say(context, &text)
}

/// What `plan --json` prints.
#[derive(Debug, Serialize)]
struct Plan {
    steps: Vec<Step>,
    refusals: Vec<Failure>,
    digest: String,
}

/// One change of a plan.
#[derive(Debug, PartialEq, Serialize)]
struct Step {
    stage: u64,
    device: String,
    knob: String,
    from: String,
    to: String,
}

/// `gpuward plan`
pub(super) fn plan(context: &mut Context, command: PlanCommand) -> Result<(), Stop> {
    let (wish, devices) = match command {
        PlanCommand::Assign { devices, force } => (Wish::Assign(force), devices.devices),
        PlanCommand::Release { devices } => (Wish::Release, devices.devices),
        PlanCommand::Vfs(VfCount { device, count }) => (Wish::Vfs(count), vec![device]),
    };
    let client = context.client()?;
    let told = client.wait(async { ManagerProxy::new(client.bus()).await?.plan(wish.goals(&devices), Options::new()).await })?;
    let told = Record(told);
    let refusals = told.records("refusals").iter().map(refusal_of).collect();
    let plan = Plan { steps: told.records("steps").iter().map(step_of).collect(), refusals, digest: told.text("digest").into() };
    if context.output.is_json() {
        context.output.json(&plan)?;
    } else {
        say(context, &plan, wish, &devices)?;
    }
    let refused = !plan.refusals.is_empty();
    for refusal in plan.refusals {
        super::stop::explain(refusal);
    }
    if refused { Err(Stop::Refused) } else { Ok(()) }
}

fn refusal_of(record: &Record) -> Failure {
    failure_in(record).unwrap_or_else(|| Failure::new(ErrorKind::Internal, "the service refused without a reason"))
}

fn step_of(record: &Record) -> Step {
    let text = |key| record.text(key).to_owned();
    let device = super::names::subject_of_path(record.text("device"));
    let stage = record.number("stage").and_then(|stage| u64::try_from(stage).ok()).unwrap_or_default();
    Step { stage, device, knob: text("knob"), from: text("from"), to: text("to") }
}

fn say(context: &mut Context, plan: &Plan, wish: Wish, devices: &[PciAddress]) -> Result<(), Stop> {
    let output = &mut context.output;
    if !plan.steps.is_empty() {
        output.table(&[], rows(&plan.steps))?;
        let names = names(devices).replace(',', "");
        let call = match wish {
            Wish::Assign(Force { force: true }) => format!("gpuward assign {names} --force"),
            Wish::Vfs(count) => format!("gpuward vfs set {names} {count}"),
            Wish::Assign(Force { force: false }) | Wish::Release => format!("gpuward {} {names}", wish.word()),
        };
        return Ok(output.line(format!("nothing was changed; `{call}` applies this"))?);
    }
    if plan.refusals.is_empty() {
        output.line(format!("nothing to do: {} as wished already", names(devices)))?;
    }
    Ok(())
}

// The stage and the device are said once, and again where they change.
fn rows(steps: &[Step]) -> Vec<Vec<String>> {
    let before = std::iter::once(None).chain(steps.iter().map(Some));
    let row = |(before, step): (Option<&Step>, &Step)| {
        let same_stage = before.is_some_and(|before| before.stage == step.stage);
        let same_device = same_stage && before.is_some_and(|before| before.device == step.device);
        let stage = if same_stage { " ".into() } else { step.stage.to_string() };
        let device = if same_device { " ".into() } else { step.device.clone() };
        vec![stage, device, step.knob.clone(), format!("{} → {}", value(&step.from), value(&step.to))]
    };
    before.zip(steps).map(row).collect()
}

fn value(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

fn names(devices: &[PciAddress]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_says_stage_and_device_once() {
        let step =
            |stage, device: &str, knob: &str| Step { stage, device: device.into(), knob: knob.into(), from: String::new(), to: "x".into() };
        let rows = rows(&[step(1, "a", "driver"), step(1, "a", "power"), step(1, "b", "driver"), step(2, "b", "power")]);
        let begins: Vec<_> = rows.iter().map(|row| (row[0].as_str(), row[1].as_str())).collect();
        assert_eq!(begins, [("1", "a"), (" ", " "), (" ", "b"), ("2", "b")]);
        assert_eq!(rows[0][3], "none → x");
    }

    #[test]
    fn goals_are_what_the_service_takes() {
        let device = "0000:41:00.0".parse().unwrap();
        let forced = Wish::Assign(Force { force: true }).goals(&[device]);
        assert_eq!(forced[0]["goal"], Variant::from("assign"));
        assert_eq!(forced[0]["device"], Variant::from("0000:41:00.0"));
        assert_eq!(forced[0]["force"], Variant::from(true));
        assert!(!Wish::Release.goals(&[device])[0].contains_key("force"));
    }
}
