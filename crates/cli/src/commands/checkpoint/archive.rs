//! `checkpoint export` and `checkpoint import`: the daemon's archive, compressed, in a file or a pipe.

use std::{
    fs::{self, File},
    io::{self, IsTerminal, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use sandboxer_protocol::admin::{
    Checkpoint, ExportCheckpointRequest, ImportCheckpointRequest, admin_client::AdminClient,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::client::{self, ClientError};

/// Stdin or stdout in place of a file.
const PIPE: &str = "-";
/// zstd's own default.
const LEVEL: i32 = 3;
/// Maximum memory that an archive's author can make this program use, as a power of 2.
const MAX_WINDOW: u32 = 23;
/// Bytes in one message to the daemon.
const PART: usize = 256 << 10;
/// Number of such messages that may wait.
const PARTS: usize = 4;

/// A file that is removed again unless it is complete.
struct Unfinished(Option<PathBuf>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

/// Writes a checkpoint to `to`. Returns the bytes of the file; `None`: it went to a pipe.
pub async fn export(
    daemon: &mut AdminClient<Channel>,
    request: ExportCheckpointRequest,
    to: &Path,
    progress: &ProgressBar,
) -> anyhow::Result<Option<u64>> {
    let is_pipe = to == Path::new(PIPE);
    if is_pipe && io::stdout().is_terminal() {
        bail!("not writing an archive to a terminal: redirect the output, or name a file");
    }
    let mut parts = client::answer(daemon.export_checkpoint(request).await)?;
    if is_pipe {
        let mut packer = packer(io::stdout())?;
        while let Some(part) = parts.message().await.map_err(ClientError::from)? {
            progress.inc(part.data.len() as u64);
            packer.write_all(&part.data).context("cannot write to stdout")?;
        }
        packer.finish().and_then(|mut out| out.flush()).context("cannot write to stdout")?;
        return Ok(None);
    }
    let failed = || format!("cannot write {}", to.display());
    let file = File::options().write(true).create_new(true).mode(0o600).open(to).with_context(failed)?;
    let mut unfinished = Unfinished(Some(to.to_owned()));
    let mut packer = packer(file)?;
    while let Some(part) = parts.message().await.map_err(ClientError::from)? {
        progress.inc(part.data.len() as u64);
        packer.write_all(&part.data).with_context(failed)?;
    }
    let file = packer.finish().with_context(failed)?;
    file.sync_all().with_context(failed)?;
    unfinished.0 = None;
    Ok(Some(file.metadata().with_context(failed)?.len()))
}

fn packer<W: Write>(to: W) -> anyhow::Result<zstd::Encoder<'static, W>> {
    let mut packer = zstd::Encoder::new(to, LEVEL)?;
    packer.include_checksum(true)?;
    Ok(packer)
}

/// Makes a checkpoint of the archive at `from`, under the names of `first` if it has some.
pub async fn import(
    daemon: &mut AdminClient<Channel>,
    first: ImportCheckpointRequest,
    from: &Path,
    progress: &ProgressBar,
) -> anyhow::Result<Checkpoint> {
    let archive: Box<dyn Read + Send> = match from == Path::new(PIPE) {
        true if io::stdin().is_terminal() => {
            bail!("not reading an archive from a terminal: redirect the input, or name a file")
        }
        true => Box::new(io::stdin()),
        false => Box::new(File::open(from).with_context(|| format!("cannot open {}", from.display()))?),
    };
    let (requests, receiver) = mpsc::channel(PARTS);
    let (progress, (sender, outcome)) = (progress.clone(), std::sync::mpsc::channel());
    std::thread::spawn(move || {
        let sent = send(archive, first, &requests, &progress);
        // Before the daemon sees the end.
        let _ = sender.send(sent);
        drop(requests);
    });
    let checkpoint = async {
        let checkpoint = daemon.import_checkpoint(ReceiverStream::new(receiver)).await?;
        checkpoint.into_inner().message().await
    };
    let checkpoint = checkpoint.await;
    // A reader that has not ended waits for input that nobody needs.
    if let Ok(Err(error)) = outcome.try_recv() {
        return Err(error)
            .with_context(|| format!("{} is no exported checkpoint, or damaged", from.display()));
    }
    match checkpoint.map_err(ClientError::from)? {
        Some(checkpoint) => Ok(checkpoint),
        None => bail!("the daemon ended before the checkpoint was imported"),
    }
}

/// Sends the content of an archive, as long as the daemon takes it.
fn send(
    archive: impl Read,
    first: ImportCheckpointRequest,
    requests: &mpsc::Sender<ImportCheckpointRequest>,
    progress: &ProgressBar,
) -> io::Result<()> {
    let mut archive = zstd::Decoder::new(archive)?;
    archive.window_log_max(MAX_WINDOW)?;
    let mut request = first;
    loop {
        let length = (&mut archive).take(PART as u64).read_to_end(&mut request.data)?;
        progress.inc(length as u64);
        if length == 0 || requests.blocking_send(request).is_err() {
            return Ok(());
        }
        request = ImportCheckpointRequest::default();
    }
}
