//! Reports when a port is listened on, without connecting: some servers fail on a connection without a request.

use std::fs;
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::thread::{ClockId, clock_nanosleep_relative};
use rustix::time::Timespec;

/// Polling interval: the kernel has no notification for a new listener.
const LOOK_NS: i64 = 20_000_000;
/// Number of polls: five minutes.
const LOOKS: u32 = 15_000;
/// Number of the kernel's state LISTEN, as /proc shows it.
const LISTEN: &str = "0A";

/// Print a line of JSON on stderr when a process in this network namespace listens on a TCP port
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The port
    port: u16,
}

/// Waits and prints the line. Fails after five minutes.
pub fn run(args: &Args) -> Result<()> {
    for _ in 0..LOOKS {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
        let [Ok(v4), v6] = tables else { bail!("cannot read /proc/net/tcp") };
        if listens(&v4, args.port) || v6.is_ok_and(|v6| listens(&v6, args.port)) {
            eprintln!("{}", serde_json::json!({ "bench_listening": args.port }));
            return Ok(());
        }
        let pause = Timespec { tv_sec: 0, tv_nsec: LOOK_NS };
        // An interrupted sleep only polls earlier.
        let _ = clock_nanosleep_relative(ClockId::Monotonic, &pause);
    }
    let limit = Duration::from_nanos(LOOK_NS as u64) * LOOKS;
    bail!("no process listens on port {} after {limit:?}", args.port)
}

/// Returns whether a table of lines "N: ADDRESS:PORT ADDRESS:PORT STATE …" (hex) has a listener on the port.
fn listens(table: &str, port: u16) -> bool {
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().and_then(|local| u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok());
        local == Some(port) && words.nth(1) == Some(LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_seen_and_a_connection_is_none() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        run(&Args { port }).unwrap();
        let client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let of_client = client.local_addr().unwrap().port();
        let table = fs::read_to_string("/proc/net/tcp").unwrap();
        assert!(listens(&table, port) && !listens(&table, of_client));
        assert!(!listens("", port) && !listens("heading\n  0: rubbish\n", port));
    }
}
