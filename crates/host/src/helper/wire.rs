//! Frames between the daemon and a helper: a header, JSON, bytes. The header may carry one descriptor.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream as StdStream,
    },
};

use nix::{
    cmsg_space,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::UnixStream,
};

/// The length of the header: the lengths of the JSON and of the bytes, 4 bytes each.
const HEAD: usize = 8;
/// Longest JSON, bytes.
const MAX_JSON: usize = 1 << 20;
/// The most bytes after the JSON: the files of a volume and their names.
const MAX_BYTES: usize = 8 << 20;

/// A message.
#[derive(Debug, Default)]
pub struct Frame {
    /// The request or the response.
    pub json: Vec<u8>,
    /// The content, such as the files of a volume.
    pub bytes: Vec<u8>,
    /// A file descriptor.
    pub descriptor: Option<OwnedFd>,
}

type Head = ([u8; HEAD], Option<OwnedFd>);

impl Frame {
    fn head(&self) -> io::Result<[u8; HEAD]> {
        let mut head = [0; HEAD];
        for (at, (length, most)) in
            [(self.json.len(), MAX_JSON), (self.bytes.len(), MAX_BYTES)].iter().enumerate()
        {
            if length > most {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("frame part has {length} bytes, more than {most}"),
                ));
            }
            let length = u32::try_from(*length).unwrap_or(u32::MAX);
            head[4 * at..4 * at + 4].copy_from_slice(&length.to_le_bytes());
        }
        Ok(head)
    }

    /// Allocates a frame for the content that a header announces.
    fn allocate((head, descriptor): Head) -> io::Result<Self> {
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let (json, bytes) = (word(0), word(4));
        if json > MAX_JSON || bytes > MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "frame is too long"));
        }
        Ok(Self { json: vec![0; json], bytes: vec![0; bytes], descriptor })
    }

    /// Sends the frame. Blocks until it is sent.
    pub fn send(&self, stream: &mut StdStream) -> io::Result<()> {
        send_head(stream.as_fd(), &self.head()?, self.descriptor.as_ref())?;
        stream.write_all(&self.json)?;
        stream.write_all(&self.bytes)
    }

    /// Waits for the next frame; `None` at the end.
    pub fn receive(stream: &mut StdStream) -> io::Result<Option<Self>> {
        let Some(head) = receive_head(stream.as_fd())? else { return Ok(None) };
        let mut frame = Self::allocate(head)?;
        stream.read_exact(&mut frame.json)?;
        stream.read_exact(&mut frame.bytes)?;
        Ok(Some(frame))
    }

    /// Sends the frame from a task.
    pub async fn send_from_task(&self, stream: &mut UnixStream) -> io::Result<()> {
        let head = self.head()?;
        stream
            .async_io(Interest::WRITABLE, || send_head(stream.as_fd(), &head, self.descriptor.as_ref()))
            .await?;
        stream.write_all(&self.json).await?;
        stream.write_all(&self.bytes).await
    }

    /// Waits for the next frame in a task; `None` at the end.
    pub async fn receive_in_task(stream: &mut UnixStream) -> io::Result<Option<Self>> {
        let head = stream.async_io(Interest::READABLE, || receive_head(stream.as_fd())).await?;
        let Some(head) = head else { return Ok(None) };
        let mut frame = Self::allocate(head)?;
        stream.read_exact(&mut frame.json).await?;
        stream.read_exact(&mut frame.bytes).await?;
        Ok(Some(frame))
    }
}

fn send_head(stream: BorrowedFd<'_>, head: &[u8; HEAD], descriptor: Option<&OwnedFd>) -> io::Result<()> {
    let descriptors: Vec<RawFd> = descriptor.iter().map(|descriptor| descriptor.as_raw_fd()).collect();
    let attached = [ControlMessage::ScmRights(&descriptors)];
    let attached = if descriptors.is_empty() { &[][..] } else { &attached };
    let sent =
        sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(head)], attached, MsgFlags::MSG_NOSIGNAL, None)?;
    // A socket accepts this few bytes at once or not at all.
    if sent == HEAD { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

fn receive_head(stream: BorrowedFd<'_>) -> io::Result<Option<Head>> {
    let mut head = [0; HEAD];
    let mut attached = cmsg_space!(RawFd);
    let mut space = [IoSliceMut::new(&mut head)];
    let message =
        recvmsg::<()>(stream.as_raw_fd(), &mut space, Some(&mut attached), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let descriptor = message.cmsgs()?.find_map(|each| match each {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    });
    // SAFETY: the kernel has just created the descriptor for this process.
    let descriptor = descriptor.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) });
    match message.bytes {
        0 => Ok(None),
        HEAD => Ok(Some((head, descriptor))),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "incomplete frame header")),
    }
}
