//! TCP throughput by message size, in both directions. Counts the received bytes.
//!
//! A client begins with the number of bytes that it requests, 8 bytes, little-endian. The server sends that many and
//! closes. If the number is zero, the client sends until it closes its side, and the server replies with the number of
//! bytes it received.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::result::Line;

/// Default size of reads and writes, bytes.
const BLOCK: usize = 128 << 10;
/// Timeout of a silent peer.
const SILENCE: Duration = Duration::from_secs(30);

/// Serve clients one after the other, for ever
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Port to listen on
    #[arg(long, default_value_t = 7000)]
    port: u16,
}

/// Send messages of one size
#[derive(Debug, clap::Args)]
pub struct SendArgs {
    /// The server
    #[arg(long)]
    to: SocketAddr,
    /// Size of a message, bytes; each one is a separate write call
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    size: u32,
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Send each message at once (TCP_NODELAY)
    #[arg(long)]
    nodelay: bool,
}

/// Receive a number of bytes
#[derive(Debug, clap::Args)]
pub struct ReceiveArgs {
    /// The server
    #[arg(long)]
    from: SocketAddr,
    /// Number of bytes
    #[arg(long, default_value_t = 1 << 30)]
    bytes: u64,
}

/// Serves until the container ends.
pub fn serve(args: &ServeArgs) -> Result<()> {
    let address = SocketAddr::from((IpAddr::from(Ipv4Addr::UNSPECIFIED), args.port));
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    for client in listener.incoming() {
        // A failed client does not end the server.
        if let Err(error) = client.map_err(anyhow::Error::from).and_then(answer) {
            eprintln!("bench-helper: a client failed: {error:#}");
        }
    }
    Ok(())
}

fn answer(mut client: TcpStream) -> Result<()> {
    client.set_read_timeout(Some(SILENCE))?;
    client.set_write_timeout(Some(SILENCE))?;
    let mut length = [0; 8];
    match client.read_exact(&mut length) {
        // The client only tested whether the server listens.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
        read => read?,
    }
    let mut block = vec![0; BLOCK];
    let mut left = u64::from_le_bytes(length);
    if left > 0 {
        while left > 0 {
            let part = block.len().min(usize::try_from(left).unwrap_or(BLOCK));
            client.write_all(&block[..part])?;
            left -= part as u64;
        }
        return Ok(());
    }
    let mut received = 0u64;
    loop {
        match client.read(&mut block)? {
            0 => break,
            count => received += count as u64,
        }
    }
    Ok(client.write_all(&received.to_le_bytes())?)
}

fn connect(server: SocketAddr, length: u64) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&server, SILENCE)
        .with_context(|| format!("cannot connect to {server}"))?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    stream.write_all(&length.to_le_bytes())?;
    Ok(stream)
}

/// Sends and prints. The time ends with the server's report of received bytes.
pub fn send(args: &SendArgs) -> Result<()> {
    let limit = Duration::try_from_secs_f64(args.seconds).context("--seconds takes seconds from 0 up")?;
    let mut stream = connect(args.to, 0)?;
    stream.set_nodelay(args.nodelay)?;
    let message = vec![0; args.size as usize];
    let (begun, mut messages) = (Instant::now(), 0u64);
    while begun.elapsed() < limit {
        // Reading the clock for each message would distort the cost of small ones.
        for _ in 0..16 {
            stream.write_all(&message).with_context(|| format!("cannot send to {}", args.to))?;
        }
        messages += 16;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut received = [0; 8];
    stream
        .read_exact(&mut received)
        .with_context(|| format!("cannot read the number of received bytes from {}", args.to))?;
    let (seconds, received) = (begun.elapsed().as_secs_f64(), u64::from_le_bytes(received));
    let sent = messages * u64::from(args.size);
    ensure!(received == sent, "{} received {received} of {sent} bytes", args.to);
    Line::new("stream-send")
        .figure("mbit_per_s", received as f64 * 8.0 / seconds / 1e6)
        .figure("messages_per_s", messages as f64 / seconds)
        .print()
}

/// Receives and prints. The time begins with the connection.
pub fn receive(args: &ReceiveArgs) -> Result<()> {
    ensure!(args.bytes > 0, "--bytes takes a number from 1 up");
    let begun = Instant::now();
    let mut stream = connect(args.from, args.bytes)?;
    let (mut block, mut received) = (vec![0; BLOCK], 0u64);
    loop {
        match stream.read(&mut block).with_context(|| format!("cannot receive from {}", args.from))? {
            0 => break,
            count => received += count as u64,
        }
    }
    ensure!(received == args.bytes, "received {received} of {} bytes from {}", args.bytes, args.from);
    let seconds = begun.elapsed().as_secs_f64();
    Line::new("stream-receive").figure("mib_per_s", received as f64 / seconds / f64::from(1 << 20)).print()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a server for `clients` clients.
    fn server(clients: usize) -> (SocketAddr, std::thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            listener.incoming().take(clients).for_each(|client| answer(client.unwrap()).unwrap());
        });
        (address, serving)
    }

    #[test]
    fn both_ways_and_one_who_only_looks() {
        let (address, serving) = server(3);
        drop(TcpStream::connect(address).unwrap());
        send(&SendArgs { to: address, size: 1000, seconds: 0.05, nodelay: true }).unwrap();
        receive(&ReceiveArgs { from: address, bytes: 300_001 }).unwrap();
        serving.join().unwrap();
    }

    #[test]
    fn a_server_that_keeps_bytes_back_is_a_failure() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            client.read_exact(&mut [0; 8]).unwrap();
            client.write_all(b"few").unwrap();
        });
        let error = receive(&ReceiveArgs { from: address, bytes: 10 }).unwrap_err().to_string();
        assert!(error.contains("3 of 10"), "{error}");
        serving.join().unwrap();
    }
}
