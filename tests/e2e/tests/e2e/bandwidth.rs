//! Limits of what a pod receives and sends: the burst at once, the rest at the rate.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::{self, Case, PATIENCE, shell};

use crate::network::{BRIDGE, addresses, host, within};

crate::cases![Vm: received_at_the_limit, sent_at_the_limit];

/// Bytes per second, with Ethernet headers.
const RATE: u64 = 512 << 10;
const BURST: u64 = 4 * RATE;
/// Twice the limit uses up the burst in the first four seconds, TCP in less; then it has lost packets and may pause for some
/// seconds. More than ten at the rate come after that.
const SETTLED: f64 = 7.0;
const WHOLE: Duration = Duration::from_secs(18);

/// Bytes of a counter at a time in seconds.
type Sample = (f64, u64);

/// Checks a flow that began at `began`, when the counter stood at `before`.
fn check(samples: &[Sample], began: f64, before: u64) -> Result<()> {
    let settled = |sample: &&Sample| sample.0 >= began + SETTLED;
    let until = |sample: &&Sample| sample.0 <= began + WHOLE.as_secs_f64() - 0.5;
    let first = samples.iter().find(settled).context("no sample of the flow at its rate")?;
    let last = samples.iter().rev().find(until).context("no sample before the flow's end")?;
    let seconds = last.0 - first.0;
    ensure!(seconds >= 10.0, "{seconds} s between the samples, not 10");
    let rate = (last.1 - first.1) as f64 / seconds;
    let burst = (first.1 - before) as f64 - RATE as f64 * (first.0 - began);
    let [rate, burst] = [rate / RATE as f64, burst / BURST as f64];
    let figures =
        format!("the rate is {rate:.3} of the limit in {seconds:.1} s, the burst {burst:.3} of its size");
    // In the output of a passed case, too: a figure that drifts is seen.
    println!("{figures}");
    // On a busy host a pause of either side moves bytes between the two, and may cost some. Their sum is bounded at any time.
    let due = BURST as f64 + RATE as f64 * (last.0 - began);
    let all = (last.1 - before) as f64 / due;
    ensure!((0.6..=1.05).contains(&all), "{all:.3} of burst and rate together have arrived; {figures}");
    // Other work of the host takes no virtual time, so there each is what was asked for.
    let exact = |part: f64| !case::in_virtual_time() || (0.95..=1.05).contains(&part);
    ensure!(exact(rate) && exact(burst), "{figures}");
    Ok(())
}

/// Sends datagrams at twice the limit, by the clock, so that a delay is made up for.
async fn flood(socket: &UdpSocket, to: SocketAddr) -> io::Result<()> {
    // With the headers of UDP, IPv4 and Ethernet.
    const FRAME: u64 = 1024;
    let payload = [0; FRAME as usize - 42];
    let began = Instant::now();
    let mut sent = 0;
    while began.elapsed() < WHOLE {
        while sent < (began.elapsed().as_secs_f64() * 2.0 * RATE as f64) as u64 {
            match socket.send_to(&payload, to) {
                // Its packets wait in the limit's queue: one more would be dropped there.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => drop(done?),
            }
            sent += FRAME;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// The guest counts what it receives of twice the limit, by its own clock.
async fn received_at_the_limit(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| {
            config.annotations.insert("io.sandboxer.net-bps-rx".into(), RATE.to_string());
            config.annotations.insert("io.sandboxer.net-bps-rx-burst".into(), BURST.to_string());
        })
        .await?;
    let script =
        "while read -r now idle </proc/uptime && read -r seen </sys/class/net/eth0/statistics/rx_bytes
        do echo at $now $seen; sleep 0.1; done";
    let meter = pod.start(shell("meter", script)).await?;
    meter.logged("at ").await?;
    let [ip, _] = addresses(&case, &pod).await?;
    // Not connected: the pod refuses each datagram.
    let socket = within(host(&case), || UdpSocket::bind("0.0.0.0:0"))?;
    socket.set_nonblocking(true)?;
    flood(&socket, SocketAddr::new(ip, 9)).await?;
    let stdout = meter.logs()?.stdout;
    let samples: Vec<Sample> = stdout
        .lines()
        .filter_map(|line| {
            let mut words = line.strip_prefix("at ")?.split_whitespace();
            Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
        })
        .collect();
    let before = samples.first().context("no sample")?.1;
    // The flow comes at twice the limit until its burst is used up.
    let begun = samples.iter().find(|sample| sample.1 > before + BURST / 8).context("nothing arrived")?;
    let began = begun.0 - (begun.1 - before) as f64 / (2 * RATE) as f64;
    check(&samples, began, before)
}

/// Returns how much has arrived by TCP until when, counted as Ethernet frames, from the connection on.
fn received(listener: &TcpListener) -> io::Result<Vec<Sample>> {
    // The stack's MTU is 1450: headers of Ethernet, of IPv4, and of TCP with its timestamps.
    const FRAME: u64 = 1450 + 14;
    const PAYLOAD: u64 = 1450 - 20 - 32;
    let (mut stream, _) = listener.accept()?;
    let began = Instant::now();
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut samples, mut bytes, mut buffer) = (vec![(0.0, 0)], 0, vec![0; 64 << 10]);
    while began.elapsed() < WHOLE {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        bytes += length as u64;
        samples.push((began.elapsed().as_secs_f64(), bytes * FRAME / PAYLOAD));
    }
    Ok(samples)
}

/// The same of what it sends, as fast as TCP can, with Kubernetes' annotation of the rate. The host counts.
async fn sent_at_the_limit(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| {
            config.annotations.insert("kubernetes.io/egress-bandwidth".into(), "4Mi".into());
            config.annotations.insert("io.sandboxer.net-bps-tx-burst".into(), BURST.to_string());
        })
        .await?;
    let ip: IpAddr = BRIDGE[0].parse()?;
    let listener = within(host(&case), move || TcpListener::bind((ip, 0)))?;
    let port = listener.local_addr()?.port();
    let reader = tokio::task::spawn_blocking(move || received(&listener));
    pod.start(shell("sender", &format!("dd if=/dev/zero bs=64k | nc {ip} {port}"))).await?;
    check(&reader.await??, 0.0, 0)
}
