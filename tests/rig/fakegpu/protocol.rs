//! The server side of vfio-user, as far as QEMU's `vfio-user-pci` speaks it.
//!
//! A message is a 16-byte header (id, command, size, flags, error; little endian) and a body. Descriptors that come
//! along (memory of the guest, eventfds) are not received, so the kernel drops them: nothing here does DMA or raises
//! an interrupt. One descriptor is ever sent: the memory of a BAR, for QEMU to map.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::device::{H100, Reset};

const HEADER: usize = 16;
const LARGEST: usize = 2 << 20;
const FLAG_REPLY: u32 = 1;
const FLAG_NO_REPLY: u32 = 1 << 4;
const FLAG_ERROR: u32 = 1 << 5;

const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;
const DMA_UNMAP: u16 = 3;
const GET_INFO: u16 = 4;
const GET_REGION_INFO: u16 = 5;
const GET_IRQ_INFO: u16 = 7;
const SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
const DEVICE_RESET: u16 = 13;

/// A larger `max_dma_maps` is refused by QEMU.
const CAPABILITIES: &[u8] = b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576,\
    \"max_dma_maps\":65535,\"pgsizes\":4096}}\0";
const REGIONS: u32 = 9;
/// Vectors of INTx, MSI, MSI-X, error and request; QEMU warns where the last two are missing.
const IRQS: [u32; 5] = [1, 0, 9, 1, 1];

struct Message {
    id: u16,
    command: u16,
    flags: u32,
    body: Vec<u8>,
}

struct Answer<'device> {
    body: Vec<u8>,
    memory: Option<BorrowedFd<'device>>,
}

impl Answer<'_> {
    fn body(body: Vec<u8>) -> Self {
        Answer { body, memory: None }
    }
}

/// Answers one client until it closes the connection.
pub fn serve(device: &mut H100, mut client: UnixStream) -> io::Result<()> {
    while let Some(message) = receive(&mut client)? {
        let answer = handle(device, &message);
        if message.flags & FLAG_NO_REPLY != 0 {
            continue;
        }
        match answer {
            Ok(answer) => reply(&mut client, &message, &answer)?,
            Err(errno) => refuse(&mut client, &message, errno)?,
        }
    }
    Ok(())
}

fn receive(client: &mut UnixStream) -> io::Result<Option<Message>> {
    let mut header = [0; HEADER];
    match client.read_exact(&mut header) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let size = u32_at(&header, 4)? as usize;
    if !(HEADER..=LARGEST).contains(&size) {
        return Err(io::Error::other(format!("a message of {size} bytes")));
    }
    // The whole body, of an unknown command too: what stays would be taken for the next header.
    let mut body = vec![0; size - HEADER];
    client.read_exact(&mut body)?;
    Ok(Some(Message {
        id: u16::from_le_bytes([header[0], header[1]]),
        command: u16::from_le_bytes([header[2], header[3]]),
        flags: u32_at(&header, 8)?,
        body,
    }))
}

fn handle<'device>(device: &'device mut H100, message: &Message) -> Result<Answer<'device>, Errno> {
    let body = &message.body;
    Ok(match message.command {
        VERSION => Answer::body([&[0; 4], CAPABILITIES].concat()),
        DMA_MAP | SET_IRQS => Answer::body(vec![]),
        DMA_UNMAP => Answer::body(body.clone()),
        GET_INFO => Answer::body(words(&[16, 1 | 2, REGIONS, IRQS.len() as u32])), // can reset; is PCI
        GET_REGION_INFO => region_info(device, u32_at(body, 8)?)?,
        GET_IRQ_INFO => irq_info(u32_at(body, 8)?)?,
        REGION_READ => region_read(device, body)?,
        REGION_WRITE => region_write(device, body)?,
        DEVICE_RESET => {
            device.reset(Reset::Bus);
            Answer::body(vec![])
        }
        _ => return Err(Errno::NOTTY),
    })
}

fn region_info(device: &H100, region: u32) -> Result<Answer<'_>, Errno> {
    if region >= REGIONS {
        return Err(Errno::INVAL);
    }
    let (size, memory) = device.region(region);
    // 1: readable, 2: writable, 4: to be mapped
    let flags = match (size, memory) {
        (0, _) => 0,
        (_, None) => 3,
        (_, Some(_)) => 7,
    };
    let mut body = words(&[32, flags, region, 0]);
    body.extend(size.to_le_bytes());
    body.extend(0_u64.to_le_bytes());
    Ok(Answer { body, memory })
}

fn irq_info(index: u32) -> Result<Answer<'static>, Errno> {
    let count = *IRQS.get(index as usize).ok_or(Errno::INVAL)?;
    // 1: by eventfd, 2: maskable, 4: masked by itself, 8: count is fixed
    let flags = match (index, count) {
        (_, 0) => 0,
        (0, _) => 1 | 2 | 4,
        (2, _) => 1 | 8,
        _ => 1,
    };
    Ok(Answer::body(words(&[16, flags, index, count])))
}

fn region_read<'device>(device: &H100, body: &[u8]) -> Result<Answer<'device>, Errno> {
    let (offset, region, count) = region_range(device, body)?;
    let mut answer = body[..16].to_vec();
    answer.resize(16 + count, 0);
    device.read(region, offset, &mut answer[16..]).map_err(|_| Errno::IO)?;
    Ok(Answer::body(answer))
}

fn region_write<'device>(device: &mut H100, body: &[u8]) -> Result<Answer<'device>, Errno> {
    let (offset, region, count) = region_range(device, body)?;
    let data = body.get(16..16 + count).ok_or(Errno::INVAL)?;
    device.write(region, offset, data).map_err(|_| Errno::IO)?;
    Ok(Answer::body(body[..16].to_vec()))
}

/// Offset, region and count of an access, within the region.
fn region_range(device: &H100, body: &[u8]) -> Result<(u64, u32, usize), Errno> {
    let offset = u64::from(u32_at(body, 0)?) | u64::from(u32_at(body, 4)?) << 32;
    let (region, count) = (u32_at(body, 8)?, u32_at(body, 12)?);
    let (size, _) = device.region(region);
    match offset.checked_add(count.into()) {
        Some(end) if end <= size && (count as usize) < LARGEST => Ok((offset, region, count as usize)),
        _ => Err(Errno::INVAL),
    }
}

fn reply(client: &mut UnixStream, message: &Message, answer: &Answer) -> io::Result<()> {
    let mut bytes = header(message, answer.body.len(), 0);
    bytes.extend(&answer.body);
    let Some(memory) = answer.memory else {
        return client.write_all(&bytes);
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [memory];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(&*client, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    client.write_all(&bytes[sent..])
}

fn refuse(client: &mut UnixStream, message: &Message, errno: Errno) -> io::Result<()> {
    client.write_all(&header(message, 0, errno.raw_os_error() as u32))
}

fn header(message: &Message, body: usize, errno: u32) -> Vec<u8> {
    let flags = if errno == 0 { FLAG_REPLY } else { FLAG_REPLY | FLAG_ERROR };
    let mut bytes = Vec::with_capacity(HEADER + body);
    bytes.extend(message.id.to_le_bytes());
    bytes.extend(message.command.to_le_bytes());
    bytes.extend(words(&[(HEADER + body) as u32, flags, errno]));
    bytes
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Errno> {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    word.map(u32::from_le_bytes).ok_or(Errno::INVAL)
}
