//! Histories on the bus.

use vfio::PciAddress;

use super::dict::{Dict, Options};
use super::error::BusError;
use super::manager::Answer;
use super::service::Service;
use crate::failure::{ErrorKind, Failure};
use crate::history::{self, Entry, Page};
use crate::request::Ask;

/// How many entries are answered where nobody asks for less or more, and how many at most.
const USUAL: u64 = 100;
const MOST: u64 = 1000;

/// `limit` and `before`.
pub(super) fn page(options: &mut Options) -> Result<Page, Failure> {
    let limit = options.number("limit")?.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Failure::new(ErrorKind::InvalidSpec, format!("limit is to be from 1 to {MOST}, not {limit}")));
    }
    Ok(Page { limit: usize::try_from(limit).unwrap_or(usize::MAX), before: options.number("before")? })
}

/// The history of a device; the file is read beside the bus.
pub(super) async fn entries(service: &Service, device: PciAddress, page: Page) -> Result<Vec<Answer>, BusError> {
    let (state_dir, identity) = service.ask(|reply| Ask::History(device, reply)).await?;
    let read = move || history::read(&state_dir, &identity, page);
    let read = tokio::task::spawn_blocking(read).await.map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
    let failed = |error: std::io::Error| Failure::new(ErrorKind::Internal, format!("cannot read the history of {device}: {error}"));
    Ok(read.map_err(failed)?.into_iter().map(answer).collect())
}

fn answer(entry: Entry) -> Answer {
    let mut details = Dict::new();
    for (key, value) in entry.details {
        details.put(&key, value);
    }
    let mut dict = Dict::new();
    dict.put("time", entry.time).put("kind", entry.kind.word()).put("text", entry.text).put("details", details.into_map());
    dict.into_map()
}
