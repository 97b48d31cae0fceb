//! The pod's network: what CNI made is what the guest has, and everybody reaches everybody.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::NamespaceMode;
use nix::sched::{CloneFlags, setns};
use sandboxer_e2e::case::{Case, Container, PATIENCE, Pod, idle, shell};
use sandboxer_e2e::cri::Answer;
use sandboxer_e2e::eventually;
use sandboxer_e2e::forward::Forward;

use crate::security::inspected;

crate::cases![
    Any: as_the_namespace_has_it, pods_reach_one_another, pod_and_host_reach_one_another, large_payloads,
        network_outlives_its_containers, two_interfaces, forwarded_port, forwarded_port_nobody_listens_at;
    Vm: pod_is_in_its_hosts_file, traffic_is_told, host_ports, who_carries_packets, only_where_its_annotation_allows;
    VmAlone: host_ports_after_a_restart_of_the_daemon, forwarded_port_after_a_restart_of_the_daemon
];

/// Where the stack's bridge is, and by which address.
pub const BRIDGE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

/// The same of the second network, which pods of some handlers have beside it.
const SECOND_BRIDGE: [&str; 2] = ["198.51.100.1", "2001:db8:1::1"];

/// Returns the network namespace in which the stack's bridge is: to pods, the host.
pub fn host(case: &Case) -> PathBuf {
    case.stack.dir().join("cni/netns")
}

/// Does `work` in the namespace that is bound to `path`.
pub fn within<T: Send>(path: PathBuf, work: impl FnOnce() -> io::Result<T> + Send) -> Result<T> {
    let done = thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(File::open(path)?, CloneFlags::CLONE_NEWNET)?;
            work()
        });
        thread.join()
    });
    Ok(done.map_err(|_| anyhow::anyhow!("the thread in the namespace panicked"))??)
}

/// A program in the bridge's namespace, ended with this.
struct Server(Child);

impl Server {
    fn start(case: &Case, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", host(case).display())).args(arguments);
        Ok(Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns what a program in the bridge's namespace prints.
async fn on_host(case: &Case, script: &str) -> Result<String> {
    let net = format!("--net={}", host(case).display());
    let output = tokio::process::Command::new("nsenter").args([&net, "sh", "-c", script]).output().await?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "on the host, '{script}' failed: {stderr}");
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

/// Returns what the pod's web server at port 80 says to the host about `path`.
fn fetch(case: &Case, ip: IpAddr, path: &str) -> Result<Vec<u8>> {
    let answer = within(host(case), || {
        let mut stream = TcpStream::connect((ip, 80))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    })?;
    let head = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").context("no answer of HTTP")?;
    Ok(answer[head + 4..].to_vec())
}

/// Returns the pod's addresses as CRI tells them, IPv4 first.
pub async fn addresses(case: &Case, pod: &Pod) -> Result<[IpAddr; 2]> {
    let network = case.cri.pod_status(&pod.id).await?.0.network.context("no network in the pod's status")?;
    let second = network.additional_ips.first().context("no second address")?;
    Ok([network.ip.parse()?, second.ip.parse()?])
}

/// As a URL has it.
fn in_url(ip: IpAddr) -> String {
    SocketAddr::new(ip, 0).to_string().trim_end_matches(":0").to_owned()
}

/// Returns a container that serves its root directory at port 80.
async fn web(pod: &Pod) -> Result<Container> {
    let web = pod.start(shell("web", "httpd -f -p 80 -h / & echo serving; wait")).await?;
    web.logged("serving").await?;
    Ok(web)
}

/// Waits until `script` succeeds in the container: servers take a moment.
async fn soon(container: &Container, script: &str) -> Result<String> {
    let done =
        eventually("a script that succeeds", PATIENCE, || async { Ok(container.sh(script).await.ok()) });
    match done.await {
        Ok(out) => Ok(out),
        // Once more, for its error.
        Err(_) => container.sh(script).await,
    }
}

/// Returns the namespace that has this address, as an argument of nsenter: CRI doesn't tell which is a pod's.
fn namespace_with(case: &Case, ip: IpAddr) -> Result<String> {
    let dir = case.stack.dir().join("containerd/state/io.containerd.grpc.v1.cri/netns");
    for entry in std::fs::read_dir(dir)? {
        let argument = format!("--net={}", entry?.path().display());
        // One that goes away meanwhile is none of this pod's.
        let shown = Command::new("nsenter").args([&argument, "ip", "-o", "-4", "address"]).output()?;
        if String::from_utf8_lossy(&shown.stdout).contains(&format!(" {ip}/")) {
            return Ok(argument);
        }
    }
    anyhow::bail!("no namespace has address {ip}")
}

/// Name, address, MTU, addresses and routes are those that the pod's namespace on the host has.
async fn as_the_namespace_has_it(case: Case) -> Result<()> {
    // In it: what `ip` prints but for indexes and flags, which are each kernel's own.
    const LOOK: &str =
        "ip link show dev eth0 | sed -n 's/.*\\( mtu [0-9]*\\).*/\\1/p; s/.*ether \\([^ ]*\\).*/\\1/p'
        ip -4 addr show dev eth0 | sed -n 's/^ *inet \\([^ ]*\\).*scope \\([^ ]*\\).*/\\1 \\2/p'
        ip -6 addr show dev eth0 | sed -n 's/^ *inet6 \\([^ ]*\\) scope \\([^ ]*\\).*/\\1 \\2/p' | sort
        ip -4 route | sed -n 's/^\\([^ ]*\\)\\( via [^ ]*\\)\\{0,1\\} dev \\([^ ]*\\).*/\\1\\2 \\3/p' | sort
        ip -6 route | sed -n 's/^\\([^ ]*\\)\\( via [^ ]*\\)\\{0,1\\} dev \\([^ ]*\\).*/\\1\\2 \\3/p' | sort";
    let pod = case.pod().await?;
    let inside = pod.output(LOOK).await?;
    let [ip, _] = addresses(&case, &pod).await?;
    let netns = namespace_with(&case, ip)?;
    let look = format!("ip() {{ busybox ip \"$@\"; }}; {LOOK}");
    let outside = Command::new("nsenter").arg(netns).args(["sh", "-c", &look]).output()?;
    ensure!(outside.status.success(), "{}", String::from_utf8_lossy(&outside.stderr));
    let outside = String::from_utf8(outside.stdout)?;
    ensure!(inside == outside.trim_end(), "inside:\n{inside}\noutside:\n{outside}");
    ensure!(inside.contains(&format!("{ip}/24")), "{ip} is not in\n{inside}");
    ensure!(inside.contains("2001:db8::") && inside.contains("default via 192.0.2.1 eth0"), "{inside}");
    Ok(())
}

async fn pods_reach_one_another(case: Case) -> Result<()> {
    let (one, other) = tokio::try_join!(case.pod(), case.pod())?;
    let _web = web(&other).await?;
    let client = one.start(idle("client")).await?;
    let expected = client.sh("md5sum < /bin/busybox").await?;
    for ip in addresses(&case, &other).await? {
        let url = in_url(ip);
        let fetched = soon(&client, &format!("wget -q -O - http://{url}/bin/busybox | md5sum")).await?;
        ensure!(fetched == expected, "TCP from {ip}: {fetched}, not {expected}");
        client.sh(&format!("ping -c 2 -w 20 {ip}")).await.with_context(|| format!("ICMP to {ip}"))?;
        // Its datagrams go to a closed port, which answers if their checksums are right.
        let kind = if ip.is_ipv4() { "" } else { "6" };
        let traced = client.sh(&format!("traceroute{kind} -n -q 1 -w 10 -m 2 {ip}")).await?;
        ensure!(traced.lines().last().is_some_and(|hop| hop.contains(" ms")), "UDP to {ip}: {traced}");
    }
    Ok(())
}

/// A pod with allowed networks begins nothing with others, and answers everybody.
async fn only_where_its_annotation_allows(case: Case) -> Result<()> {
    let (allowed, other) = tokio::try_join!(case.pod(), case.pod())?;
    let _webs = (web(&allowed).await?, web(&other).await?);
    let rules = addresses(&case, &allowed).await?.map(|ip| format!("{ip} tcp 80")).join(", ");
    let bound = case
        .pod_with(|config| drop(config.annotations.insert("io.sandboxer.egress".into(), rules.clone())))
        .await?;
    let (_web, client) = (web(&bound).await?, bound.start(idle("client")).await?);
    let from = other.start(idle("from")).await?;
    let mut servers = addresses(&case, &other).await?.into_iter();
    for ip in addresses(&case, &allowed).await? {
        soon(&client, &format!("wget -q -O /dev/null http://{}/bin/busybox", in_url(ip))).await?;
        let other = servers.next().context("no second address")?;
        for refused in [
            format!("wget -q -T 5 -O /dev/null http://{}/bin/busybox", in_url(other)),
            // Its rule is for TCP.
            format!("ping -c 1 -w 3 {ip}"),
        ] {
            ensure!(client.sh(&refused).await.is_err(), "{refused} in a pod that may send to {rules}");
        }
    }
    for ip in addresses(&case, &bound).await? {
        soon(&from, &format!("wget -q -O /dev/null http://{}/bin/busybox", in_url(ip))).await?;
    }
    Ok(())
}

/// Returns the kernel's threads that carry a VMM's packets, with their control groups: threads of the VMM, or processes.
fn carriers(vmm: u64) -> Result<Vec<String>> {
    let name = format!("vhost-{vmm}");
    let all = fs::read_dir("/proc")?.chain(fs::read_dir(format!("/proc/{vmm}/task"))?);
    let mut found = Vec::new();
    for entry in all {
        let at = entry?.path();
        // What is no process, or has just ended, has no name.
        if fs::read_to_string(at.join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            found.push(fs::read_to_string(at.join("cgroup"))?);
        }
    }
    Ok(found)
}

/// On QEMU with KVM it is the host's kernel, if it has vhost-net, and that work is counted with the pod. Elsewhere it is the VMM.
async fn who_carries_packets(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let _web = web(&pod).await?;
    let vmm = inspected(&case, &pod)?["vmm_pid"].as_u64().context("no vmm_pid")?;
    let open = |device: &str| -> Result<bool> {
        let files = fs::read_dir(format!("/proc/{vmm}/fd"))?;
        let targets = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        Ok(targets.into_iter().any(|target| target == Path::new(device)))
    };
    let is_qemu = fs::read_to_string(format!("/proc/{vmm}/comm"))?.starts_with("qemu");
    let expected = is_qemu && open("/dev/kvm")? && Path::new("/dev/vhost-net").exists();
    let (found, group) = (carriers(vmm)?, fs::read_to_string(format!("/proc/{vmm}/cgroup"))?);
    println!("carried by {}", if expected { "the host's kernel" } else { "the VMM" });
    ensure!(open("/dev/vhost-net")? == expected, "expected is {expected}");
    ensure!(found.len() == usize::from(expected), "{found:?}");
    ensure!(
        found.iter().all(|cgroup| *cgroup == group),
        "counted elsewhere: {found:?}, the VMM is in {group}"
    );
    for ip in addresses(&case, &pod).await? {
        let fetched = eventually("the pod's web server", PATIENCE, || async {
            Ok(fetch(&case, ip, "/bin/busybox").ok())
        });
        ensure!(fetched.await?.starts_with(b"\x7fELF"), "no program from {ip}");
    }
    Ok(())
}

async fn pod_and_host_reach_one_another(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = web(&pod).await?;
    for ip in addresses(&case, &pod).await? {
        on_host(&case, &format!("busybox ping -c 2 -w 20 {ip}")).await?;
        let fetched = eventually("the pod's web server", PATIENCE, || async {
            Ok(fetch(&case, ip, "/etc/hostname").ok())
        });
        let fetched = fetched.await?;
        ensure!(fetched == b"pod\n", "TCP to {ip}: {fetched:?}");
        let refused = within(host(&case), move || {
            let socket = UdpSocket::bind(if ip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.connect((ip, 9))?;
            socket.send(b"discarded")?;
            Ok(socket.recv(&mut [0; 16]).map_err(|error| error.kind()))
        })?;
        ensure!(refused == Err(io::ErrorKind::ConnectionRefused), "UDP to {ip}: {refused:?}");
    }
    for gateway in BRIDGE {
        container.sh(&format!("ping -c 2 -w 20 {gateway}")).await?;
        let answer = resolve_at(&case, &container, gateway).await?;
        ensure!(answer.contains("203.0.113.7"), "UDP to {gateway} and back: {answer}");
    }
    Ok(())
}

/// Returns what nslookup says in the container, asking a server on the host that answers once, with 203.0.113.7.
async fn resolve_at(case: &Case, container: &Container, server: &str) -> Result<String> {
    let ip: IpAddr = server.parse()?;
    // An address of IPv6 can be used a second after the bridge got it.
    let socket = eventually("the bridge's address", PATIENCE, || async {
        Ok(within(host(case), move || UdpSocket::bind((ip, 53))).ok())
    });
    let socket = socket.await?;
    socket.set_read_timeout(Some(PATIENCE))?;
    thread::spawn(move || -> io::Result<()> {
        let mut query = [0; 512];
        let (length, from) = socket.recv_from(&mut query)?;
        // The query with its answer behind it: a name that points to the question's, type A, class IN, 60 s.
        let mut answer = query[..length].to_vec();
        answer[2..4].copy_from_slice(&[0x81, 0x80]);
        answer[6..8].copy_from_slice(&[0, 1]);
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 203, 0, 113, 7]);
        socket.send_to(&answer, from).map(drop)
    });
    container.sh(&format!("nslookup -type=a pod.example {server}")).await
}

async fn large_payloads(case: Case) -> Result<()> {
    const SIZE: usize = 24 << 20;
    let pod = case.pod().await?;
    let container = web(&pod).await?;
    let dir = tempfile::tempdir()?;
    let payload: Vec<u8> =
        (0..SIZE / 8).flat_map(|i| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    std::fs::write(dir.path().join("payload"), &payload)?;
    let root = dir.path().display().to_string();
    let _server = Server::start(&case, &["busybox", "httpd", "-f", "-p", "8080", "-h", &root])?;
    let expected = on_host(&case, &format!("md5sum < {root}/payload")).await?;
    let [v4, v6] = addresses(&case, &pod).await?;
    for (gateway, ip) in [(format!("{}:8080", BRIDGE[0]), v4), (format!("[{}]:8080", BRIDGE[1]), v6)] {
        let script = format!("wget -q -O /tmp/payload http://{gateway}/payload && md5sum < /tmp/payload");
        let fetched = soon(&container, &script).await?;
        ensure!(fetched == expected, "into the pod from {gateway}: {fetched}, not {expected}");
        let back = fetch(&case, ip, "/tmp/payload")?;
        ensure!(back == payload, "out of the pod from {ip}: {} bytes", back.len());
        // In fragments.
        container
            .sh(&format!("ping -c 1 -w 20 -s 9000 {}", if ip.is_ipv4() { BRIDGE[0] } else { BRIDGE[1] }))
            .await?;
        on_host(&case, &format!("busybox ping -c 1 -w 20 -s 9000 {ip}")).await?;
    }
    Ok(())
}

async fn network_outlives_its_containers(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let before = addresses(&case, &pod).await?;
    for name in ["first", "second"] {
        let container =
            pod.start(shell(name, "ping -c 1 -w 20 192.0.2.1 && ping -c 1 -w 20 2001:db8::1")).await?;
        let ended = container.ended().await?;
        ensure!(ended.exit_code == 0, "{name}: {}", container.logs()?.stdout);
    }
    ensure!(addresses(&case, &pod).await? == before);
    Ok(())
}

/// A pod with two networks has an interface in each, and reaches both by it.
async fn two_interfaces(case: Case) -> Result<()> {
    let config = case.pod_config();
    let id = case.cri.run_pod(&config, &format!("{}-two", case.handler)).await?;
    let container = case.pod_of(&id, config).start(idle("c")).await?;
    let names = container.sh("ls /sys/class/net").await?;
    ensure!(names.split_whitespace().filter(|name| name.starts_with("eth")).eq(["eth0", "eth1"]), "{names}");
    for (name, mtu, networks, bridges) in [
        ("eth0", 1450, ["192.0.2.", "2001:db8::"], BRIDGE),
        ("eth1", 1400, ["198.51.100.", "2001:db8:1::"], SECOND_BRIDGE),
    ] {
        let shown = container.sh(&format!("ip addr show dev {name}")).await?;
        ensure!(shown.contains(&format!("mtu {mtu} ")), "{shown}");
        for (network, bridge) in networks.into_iter().zip(bridges) {
            let address = shown.split_whitespace().find(|word| word.starts_with(network));
            let address = address.and_then(|word| word.split('/').next()).with_context(|| shown.clone())?;
            container.sh(&format!("ping -c 1 -w 20 -I {name} {bridge}")).await?;
            on_host(&case, &format!("busybox ping -c 1 -w 20 {address}")).await?;
        }
    }
    let routes = container.sh("ip route").await?;
    ensure!(routes.contains("default via 192.0.2.1 dev eth0"), "{routes}");
    ensure!(routes.contains("203.0.113.0/24 via 198.51.100.1 dev eth1"), "{routes}");
    Ok(())
}

async fn pod_is_in_its_hosts_file(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let hosts = pod.output("cat /etc/hosts").await?;
    for ip in addresses(&case, &pod).await? {
        ensure!(hosts.lines().any(|line| line == format!("{ip}\tpod")), "{ip} is not in\n{hosts}");
    }
    Ok(())
}

/// Returns what the pod's web server at `port` says to a request for `path`, through port-forward.
async fn forwarded(case: &Case, pod: &Pod, port: u16, path: &str) -> Result<Vec<u8>> {
    let mut forward = Forward::open(&case.cri.port_forward(&pod.id, port).await?).await?;
    forward.write(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    // The server ends the connection behind its answer; whether that ends the stream is the runtime's matter.
    let whole = |data: &[u8], _: &[u8]| {
        let Some(head) = data.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
        let length = String::from_utf8_lossy(&data[..head])
            .lines()
            .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok());
        length.is_some_and(|length| data.len() >= head + 4 + length)
    };
    forward.until(whole, PATIENCE).await?;
    let error = String::from_utf8_lossy(forward.error());
    ensure!(whole(forward.data(), &[]), "half an answer of {} bytes; {error}", forward.data().len());
    Ok(forward.data().to_vec())
}

async fn forwarded_port(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let script = "httpd -f -p 127.0.0.1:8080 -h / & httpd -f -p [::1]:8081 -h / & httpd -f -p 80 -h / & wait";
    let web = pod.start(shell("web", script)).await?;
    let size: usize = web.sh("stat -c %s /bin/busybox").await?.parse()?;
    // A containerd on a host that knows localhost by its IPv4 address alone reaches the second with us only,
    // since the guest knows both.
    let ports: &[u16] = if case.in_vm() { &[8080, 8081, 80] } else { &[8080, 80] };
    for &port in ports {
        soon(&web, &format!("netstat -ltn | grep -q :{port}")).await?;
        let answer = forwarded(&case, &pod, port, "/etc/hostname").await?;
        ensure!(answer.ends_with(b"\r\n\r\npod\n"), "port {port}: {:?}", String::from_utf8_lossy(&answer));
    }
    let large = forwarded(&case, &pod, 8080, "/bin/busybox").await?;
    let file = std::fs::read("/bin/busybox").or_else(|_| std::fs::read("/usr/bin/busybox"))?;
    ensure!(large.len() > size && large.ends_with(&file), "{} bytes of {size}", large.len());
    Ok(())
}

async fn forwarded_port_nobody_listens_at(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut forward = Forward::open(&case.cri.port_forward(&pod.id, 9).await?).await?;
    // Tried by some when they are spoken to, not before.
    let _ = forward.write(b"anybody?").await;
    forward.until(|_, error| !error.is_empty(), PATIENCE).await?;
    let error = String::from_utf8_lossy(forward.error()).into_owned();
    ensure!(forward.data().is_empty() && !error.is_empty(), "an error was due: {error:?}");
    Ok(())
}

async fn forwarded_port_after_a_restart_of_the_daemon(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    case.stack.end("sandboxer", nix::sys::signal::Signal::SIGKILL).await?;
    case.stack.run_up()?;
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    let web = web(&pod).await?;
    soon(&web, "netstat -ltn | grep -q :80").await?;
    let answer = forwarded(&case, &pod, 80, "/etc/hostname").await?;
    ensure!(answer.ends_with(b"pod\n"), "{:?}", String::from_utf8_lossy(&answer));
    web.sh("ping -c 1 -w 20 192.0.2.1").await?;
    Ok(())
}

/// `inspect` tells what an interface has carried, at what rate it does, and its offloads.
async fn traffic_is_told(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let interface = || Ok::<_, anyhow::Error>(inspected(&case, &pod)?["interfaces"][0].clone());
    let bytes = |interface: &serde_json::Value, way: &str| interface[way]["bytes"].as_u64().unwrap_or(0);
    let before = interface()?;
    let ping = pod.start(shell("ping", "while :; do ping -c 1 -s 1400 192.0.2.1 >/dev/null; done")).await?;
    let busy = eventually("traffic both ways", PATIENCE, || async {
        let now = interface()?;
        let rate = |way: &str| now[way]["bytes_per_second"].as_u64().unwrap_or(0);
        Ok((rate("received") > 1400 && rate("sent") > 1400).then_some(now))
    });
    let busy = busy.await?;
    for way in ["received", "sent"] {
        ensure!(bytes(&busy, way) > bytes(&before, way) + 1400, "{way}: {before}, {busy}");
        ensure!(busy[way]["dropped"] == 0 && busy[way]["errors"] == 0, "{busy}");
    }
    let offloads = busy["offloads"].as_array().context("offloads")?;
    ensure!(offloads.iter().any(|offload| offload == "checksums"), "{busy}");
    let text = case.stack.cli(&["inspect", &pod.id])?;
    ensure!(text.contains("received ") && text.contains("offloads checksums"), "{text}");
    case.cri.stop(&ping.id, 0).await?;
    Ok(())
}

/// Returns a free port of the host.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("[::]:0")?.local_addr()?.port())
}

/// Returns a pod in the host's network that asks for these ports of it.
async fn with_host_ports(case: &Case, ports: &str) -> Answer<Pod> {
    case.pod_with(|config| {
        config.annotations.insert("io.sandboxer.host-ports".into(), ports.into());
        let linux = config.linux.get_or_insert_default();
        let security = linux.security_context.get_or_insert_default();
        security.namespace_options.get_or_insert_default().network = NamespaceMode::Node.into();
    })
    .await
}

/// Returns what the pod's web server says at this port of the host.
async fn served_at(port: u16, ip: &str) -> Result<String> {
    let address = SocketAddr::new(ip.parse()?, port);
    let ask = move || -> io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /said HTTP/1.0\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response).map(|_| response)
    };
    // A server takes a moment; until then connections end without a word.
    let response = eventually("the pod's server at the host's port", PATIENCE, || async {
        Ok(tokio::task::spawn_blocking(ask).await?.ok().filter(|response| !response.is_empty()))
    });
    Ok(response.await?.rsplit("\r\n\r\n").next().unwrap_or_default().trim_end().to_owned())
}

/// Connections to ports of the host that a pod in its network names are carried into the pod, and to no others.
async fn host_ports(case: Case) -> Result<()> {
    let (first, second) = (free_port()?, free_port()?);
    let pod = with_host_ports(&case, &format!("{first}, {second}/tcp")).await?;
    let serve = |port, at: &str| {
        format!(
            "mkdir /tmp/{port}; echo of {port} >/tmp/{port}/said; httpd -f -p {at}{port} -h /tmp/{port} &"
        )
    };
    let script = format!("{} {} wait", serve(first, "127.0.0.1:"), serve(second, ""));
    pod.start(shell("servers", &script)).await?;
    for (port, ip) in [(first, "127.0.0.1"), (second, "127.0.0.1"), (first, "::1")] {
        ensure!(served_at(port, ip).await? == format!("of {port}"), "port {port} at {ip}");
    }
    let taken = with_host_ports(&case, &first.to_string()).await.err().context("a port was given twice")?;
    ensure!(taken.message().contains(&format!("TCP port {first} of the host")), "{taken}");
    for bad in ["53/udp", "http"] {
        let refused = with_host_ports(&case, bad).await.err().with_context(|| format!("{bad} was taken"))?;
        ensure!(refused.message().contains("io.sandboxer.host-ports"), "{refused}");
    }
    let own = case.pod_with(|config| {
        config.annotations.insert("io.sandboxer.host-ports".into(), second.to_string());
    });
    let refused = own.await.err().context("a pod with a network of its own got a port of the host")?;
    ensure!(refused.message().contains("hostNetwork"), "{refused}");
    case.cri.stop_pod(&pod.id).await?;
    TcpListener::bind(("::", first)).context("the port is not free after the pod")?;
    Ok(())
}

async fn host_ports_after_a_restart_of_the_daemon(case: Case) -> Result<()> {
    let port = free_port()?;
    let pod = with_host_ports(&case, &port.to_string()).await?;
    case.stack.end("sandboxer", nix::sys::signal::Signal::SIGKILL).await?;
    case.stack.run_up()?;
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    let script = format!("echo again >/tmp/said; httpd -f -p 127.0.0.1:{port} -h /tmp & echo serving; wait");
    let server = pod.start(shell("server", &script)).await?;
    server.logged("serving").await?;
    ensure!(served_at(port, "127.0.0.1").await? == "again");
    // While there is no worker, who connects waits for the next one.
    case.stack.kill_worker()?;
    TcpStream::connect(("127.0.0.1", port)).context("the port was let go of")?;
    ensure!(served_at(port, "127.0.0.1").await? == "again");
    Ok(())
}
