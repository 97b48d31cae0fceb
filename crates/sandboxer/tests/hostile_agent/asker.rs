//! A guest's kernel that requests files of a share as fast as it gets answers, with as many requests at once as
//! possible.

use std::{io, path::PathBuf, time::Duration};

use sandboxer_protocol::share::{MAX_DATA, SLOTS, opcode};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::Nature;

/// The file that is read; a test puts it into the shared directory.
pub const FILE: &str = "big";

const ROOT: u64 = 1;
/// The share is attached a little after the first request.
const SOON: Duration = Duration::from_millis(5);

/// Opens as many streams as possible, and some more, until the server is gone. Each begins with `key`.
pub fn ask(shares: PathBuf, key: Vec<u8>, nature: Nature) {
    tokio::spawn(async move {
        let Ok(mut first) = Asker::connect(&shares, &key).await else { return };
        let Ok(found) = first.find().await else { return };
        for _ in 1..2 * SLOTS {
            if let Ok(other) = Asker::connect(&shares, &key).await {
                tokio::spawn(other.harm(nature, found));
            }
        }
        first.harm(nature, found).await;
    });
}

/// An open file.
#[derive(Debug, Clone, Copy)]
struct Found {
    node: u64,
    handle: u64,
}

/// One stream of requests.
struct Asker {
    stream: UnixStream,
    unique: u64,
}

impl Asker {
    async fn connect(shares: &PathBuf, key: &[u8]) -> io::Result<Self> {
        let mut stream = UnixStream::connect(shares).await?;
        stream.write_all(key).await?;
        Ok(Self { stream, unique: 2 })
    }

    /// Opens the file in the only share.
    async fn find(&mut self) -> io::Result<Found> {
        // 7.36, reading ahead, all flags.
        let init = [7, 36, 65536, 0x7fff_ffff].map(u32::to_le_bytes).concat();
        self.exchange(opcode::INIT, 0, &[init, vec![0; 48]].concat()).await?;
        let listing = number(&self.exchange(opcode::OPENDIR, ROOT, &[0; 8]).await?, 16);
        let name = loop {
            let listed = self.exchange(opcode::READDIR, ROOT, &reading(listing, 4096)).await?;
            // `struct fuse_dirent`, after the answer's header.
            let length = number(&listed, 32) as usize & 0xff;
            if let Some(name) = listed.get(40..40 + length).filter(|name| !name.is_empty()) {
                break name.to_vec();
            }
            tokio::time::sleep(SOON).await;
        };
        let named = |name: &[u8]| [name, b"\0"].concat();
        let share = number(&self.exchange(opcode::LOOKUP, ROOT, &named(&name)).await?, 16);
        let node = number(&self.exchange(opcode::LOOKUP, share, &named(FILE.as_bytes())).await?, 16);
        let handle = number(&self.exchange(opcode::OPEN, node, &[0; 8]).await?, 16);
        Ok(Found { node, handle })
    }

    async fn harm(mut self, nature: Nature, Found { node, handle }: Found) {
        loop {
            let done = match nature {
                Nature::FloodsRequests => self.exchange(opcode::GETATTR, ROOT, &[0; 16]).await.map(drop),
                Nature::NeverTakesAnswers => {
                    self.send(opcode::READ, node, &reading(handle, MAX_DATA as u32)).await
                }
                _ => self.exchange(opcode::READ, node, &reading(handle, MAX_DATA as u32)).await.map(drop),
            };
            if done.is_err() {
                return;
            }
        }
    }

    async fn send(&mut self, opcode: u32, node: u64, body: &[u8]) -> io::Result<()> {
        self.unique += 2;
        let length = 40 + body.len() as u32;
        let mut message = [length, opcode].map(u32::to_le_bytes).concat();
        message.extend([self.unique, node, 0, 0].map(u64::to_le_bytes).concat());
        message.extend(body);
        self.stream.write_all(&message).await
    }

    async fn exchange(&mut self, opcode: u32, node: u64, body: &[u8]) -> io::Result<Vec<u8>> {
        self.send(opcode, node, body).await?;
        let length = self.stream.read_u32_le().await?;
        let mut answer = vec![0; length as usize];
        self.stream.read_exact(&mut answer[4..]).await?;
        Ok(answer)
    }
}

fn number(answer: &[u8], at: usize) -> u64 {
    let bytes = answer.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// Returns a `struct fuse_read_in` at offset 0.
fn reading(handle: u64, size: u32) -> Vec<u8> {
    let mut body = [handle, 0].map(u64::to_le_bytes).concat();
    body.extend([size, 0, 0, 0, 0, 0].map(u32::to_le_bytes).concat());
    body
}
