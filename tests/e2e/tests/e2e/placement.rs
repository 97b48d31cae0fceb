//! Pods on NUMA nodes: where their VMMs run, where the kernel has put their memory, and what a move does. On hosts with two
//! nodes: `make test-placement` makes one. Reserved CPUs on any host.

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_cri::v1::LinuxContainerResources;
use nix::unistd::Pid;
use sandboxer_e2e::case::{Case, Container, PATIENCE, Pod, idle};
use sandboxer_e2e::eventually;
use serde_json::Value;

use crate::templates::pool_is_filled;

crate::cases![
    Numa: a_pod_and_its_memory_are_on_one_node, a_pod_that_is_larger_than_a_node_is_not_placed,
        the_cpu_manager_wins, moved_with_its_memory_and_known_to_the_next_daemon, placed_and_unplaced,
        memory_in_huge_pages_is_reserved_and_on_one_node;
    VmAlone: no_vmm_runs_on_reserved_cpus
];

/// The least part of a placed pod's memory that is on its node, percent.
const LOCAL: f64 = 99.0;
/// The same after memory has moved: the kernel leaves pages that are in use at that moment.
const LOCAL_AFTER_MOVE: f64 = 95.0;
/// Pods of one row of the table.
const PODS: usize = 4;
/// Fills memory of the guest; it stays taken from the host.
const FILL: &str = "head -c 48000000 /dev/zero > /dev/shm/fill && wc -c < /dev/shm/fill";

/// Runs a pod whose VM boots, so that it shares no memory with a template.
async fn booted(case: &Case, vcpus: u64) -> Result<Pod> {
    let mut config = case.pod_config();
    config.annotations.insert("io.sandboxer.vcpus".into(), vcpus.to_string());
    Ok(case.pod_of(&case.cri.run_pod(&config, "sandboxer-boot").await?, config))
}

/// Returns what `place` says of a pod.
fn place(case: &Case, pod: &str) -> Result<Value> {
    Ok(case.stack.cli_json(&["place", pod])?["places"][0].clone())
}

/// Returns the CPUs of each node, as a list.
fn nodes(case: &Case) -> Result<Vec<String>> {
    let report = case.stack.cli_json(&["place"])?;
    let nodes = report["nodes"].as_array().context("no nodes")?;
    let cpus = |node: &Value| Some(node["cpus"].as_str()?.to_owned());
    nodes.iter().map(|node| cpus(node).context("no CPUs")).collect()
}

/// Returns which part of its memory a pod has on `node`, percent; without one, on that which has most.
#[expect(clippy::cast_precision_loss, reason = "a share for people")]
fn share(place: &Value, node: Option<u64>) -> Result<f64> {
    let memory = place["memory"].as_array().with_context(|| format!("no memory: {place}"))?;
    let bytes = |entry: &Value| entry["bytes"].as_u64().unwrap_or_default();
    let all: u64 = memory.iter().map(bytes).sum();
    ensure!(all > 48_000_000, "only {all} bytes are seen: {place}");
    let here =
        memory.iter().filter(|entry| node.is_none() || entry["node"].as_u64() == node).map(bytes).max();
    Ok(100.0 * here.unwrap_or_default() as f64 / all as f64)
}

/// Returns the node of a pod.
fn node_of(place: &Value) -> Result<u64> {
    place["node"].as_u64().with_context(|| format!("it is on no node: {place}"))
}

/// Waits until all threads of a VMM have this line in their status.
async fn threads_say(vmm: Pid, name: &str, value: &str) -> Result<()> {
    let line = format!("\n{name}:\t{value}\n");
    eventually(&format!("the VMM with {name} {value}"), PATIENCE, || async {
        for thread in std::fs::read_dir(format!("/proc/{vmm}/task"))? {
            let status = std::fs::read_to_string(thread?.path().join("status"))?;
            if !status.contains(&line) {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
    .await
}

async fn filled(pod: &Pod) -> Result<Container> {
    let container = pod.start(idle("fill")).await?;
    ensure!(container.sh(FILL).await? == "48000000");
    Ok(container)
}

async fn a_pod_and_its_memory_are_on_one_node(case: Case) -> Result<()> {
    let cpus = nodes(&case)?;
    let (one, other) = (booted(&case, 1).await?, booted(&case, 1).await?);
    let mut taken = Vec::new();
    for pod in [&one, &other] {
        filled(pod).await?;
        let place = place(&case, &pod.id)?;
        let node = node_of(&place)?;
        taken.push(node);
        let own = &cpus[usize::try_from(node)?];
        ensure!(place["policy"] == "numa" && place["cpus"] == **own, "{place}");
        threads_say(case.vmm_of(&pod.id).await?, "Cpus_allowed_list", own).await?;
        ensure!(share(&place, Some(node))? >= LOCAL, "{place}");
    }
    ensure!(taken[0] != taken[1], "both are on node {}", taken[0]);
    let inspected = case.stack.cli_json(&["inspect", &one.id])?;
    ensure!(inspected["place"]["node"] == taken[0], "{}", inspected["place"]);
    Ok(())
}

async fn a_pod_that_is_larger_than_a_node_is_not_placed(case: Case) -> Result<()> {
    let all = u64::try_from(std::thread::available_parallelism()?.get())?;
    let pod = booted(&case, all).await?;
    let place = place(&case, &pod.id)?;
    ensure!(place["node"].is_null() && place["policy"] == "none" && place["cpus"] == "", "{place}");
    ensure!(place["reason"] == "it is larger than a node", "{place}");
    let moved = case.stack.command("sandboxer-cli").args(["place", "--move", &pod.id, "0"]).output()?;
    let stderr = String::from_utf8_lossy(&moved.stderr).into_owned();
    ensure!(!moved.status.success() && stderr.contains("do not fit node 0"), "{stderr}");
    Ok(())
}

/// As kubelet's CPU manager and memory manager ask: exclusive CPUs of the node that the pod is not on.
async fn the_cpu_manager_wins(case: Case) -> Result<()> {
    let cpus = nodes(&case)?;
    let pod = booted(&case, 1).await?;
    filled(&pod).await?;
    let before = node_of(&place(&case, &pod.id)?)?;
    let other = u64::from(before == 0);
    let exclusive = cpus[usize::try_from(other)?].split(['-', ',']).next().context("no CPU")?.to_owned();
    let mut config = idle("exclusive");
    let resources = LinuxContainerResources { cpuset_cpus: exclusive.clone(), ..Default::default() };
    config.linux.get_or_insert_default().resources = Some(resources);
    // All containers have a set once the first one has got its own.
    let (container, vmm) = (pod.start(config).await?, case.vmm_of(&pod.id).await?);
    for id in case.cri.containers(&pod.id).await? {
        if id != container.id {
            let set = LinuxContainerResources { cpuset_cpus: exclusive.clone(), ..Default::default() };
            case.cri.update(&id, set).await?;
        }
    }
    threads_say(vmm, "Cpus_allowed_list", &exclusive).await?;
    eventually("its memory on the node of its CPUs", PATIENCE, || async {
        let place = place(&case, &pod.id)?;
        let is_there = place["node"] == other && share(&place, Some(other))? >= LOCAL_AFTER_MOVE;
        Ok((is_there && place["policy"] == "cri").then_some(()))
    })
    .await?;
    // Back, with its memory bound.
    let first = cpus[usize::try_from(before)?].split(['-', ',']).next().context("no CPU")?.to_owned();
    for id in case.cri.containers(&pod.id).await? {
        let set = LinuxContainerResources {
            cpuset_cpus: first.clone(),
            cpuset_mems: before.to_string(),
            ..Default::default()
        };
        case.cri.update(&id, set).await?;
    }
    threads_say(vmm, "Cpus_allowed_list", &first).await?;
    threads_say(vmm, "Mems_allowed_list", &before.to_string()).await?;
    ensure!(container.sh("echo here").await? == "here");
    Ok(())
}

async fn moved_with_its_memory_and_known_to_the_next_daemon(case: Case) -> Result<()> {
    let cpus = nodes(&case)?;
    let pod = booted(&case, 1).await?;
    let container = filled(&pod).await?;
    let from = node_of(&place(&case, &pod.id)?)?;
    let to = u64::from(from == 0);
    let moved = case.stack.cli_json(&["place", "--move", &pod.id, &to.to_string()])?;
    println!(
        "moved {} MiB from node {from} to node {to} in {} ms; {} KiB stay",
        moved["moved_bytes"].as_u64().unwrap_or_default() >> 20,
        moved["took_ns"].as_u64().unwrap_or_default() / 1_000_000,
        moved["left_bytes"].as_u64().unwrap_or_default() >> 10
    );
    ensure!(moved["from"] == from && moved["moved_bytes"].as_u64() > Some(48_000_000), "{moved}");
    ensure!(share(&moved["place"], Some(to))? >= LOCAL_AFTER_MOVE, "{moved}");
    threads_say(case.vmm_of(&pod.id).await?, "Cpus_allowed_list", &cpus[usize::try_from(to)?]).await?;
    ensure!(container.sh("wc -c < /dev/shm/fill").await? == "48000000");

    case.stack.kill_worker()?;
    eventually("the place after the next daemon's start", PATIENCE, || async {
        let place = place(&case, &pod.id)?;
        let is_same = place["node"] == to && place["reason"] == "moved on request";
        Ok((is_same && place["cpus"] == *cpus[usize::try_from(to)?]).then_some(()))
    })
    .await?;
    // What it takes from now on is there, too.
    ensure!(container.sh("head -c 12000000 /dev/zero > /dev/shm/more && echo taken").await? == "taken");
    ensure!(share(&place(&case, &pod.id)?, Some(to))? >= LOCAL_AFTER_MOVE);
    Ok(())
}

/// Prints which part of its memory a pod has on one node, by policy and start path. Copies of a template are shown and not
/// judged: they share its memory, which is on one node.
async fn placed_and_unplaced(case: Case) -> Result<()> {
    let path = case.stack.dir().join("sandboxer/config.toml");
    let config = std::fs::read_to_string(&path)?;
    let mut rows = Vec::new();
    for (handler, name) in
        [("sandboxer-boot", "boot"), ("sandboxer-template", "template"), ("sandboxer", "pool")]
    {
        rows.push(("numa", name, shares(&case, handler).await?));
    }
    std::fs::write(&path, format!("{config}\n[placement]\npolicy = \"off\"\n"))?;
    case.stack.kill_worker()?;
    let unplaced = shares(&case, "sandboxer-boot").await;
    std::fs::write(&path, &config)?;
    case.stack.kill_worker()?;
    rows.push(("off", "boot", unplaced?));
    println!(
        "policy  start path  pods  least  mean   (% of a pod's memory on its node; off: on the node with most)"
    );
    for (policy, name, shares) in &rows {
        let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
        #[expect(clippy::cast_precision_loss, reason = "a few pods")]
        let mean = shares.iter().sum::<f64>() / shares.len() as f64;
        println!("{policy:<6}  {name:<10}  {:>4}  {least:>5.1}  {mean:>5.1}", shares.len());
        ensure!((*policy, *name) != ("numa", "boot") || least >= LOCAL, "{least} % are local");
    }
    Ok(())
}

/// Runs pods at once, which fill memory. Returns the part that each has on its node.
async fn shares(case: &Case, handler: &str) -> Result<Vec<f64>> {
    if handler == "sandboxer" {
        pool_is_filled(case).await?;
    }
    let run = |_| async {
        let config = case.pod_config();
        let pod = case.pod_of(&case.cri.run_pod(&config, handler).await?, config);
        filled(&pod).await?;
        anyhow::Ok(pod)
    };
    let pods: Vec<Pod> = stream::iter(0..PODS).map(run).buffer_unordered(PODS).try_collect().await?;
    let mut shares = Vec::new();
    for pod in &pods {
        let place = place(case, &pod.id)?;
        println!("{handler}: node {}, {}: {}", place["node"], place["reason"], place["memory"]);
        shares.push(share(&place, place["node"].as_u64())?);
    }
    for pod in pods {
        case.remove(&pod.id).await?;
    }
    Ok(shares)
}

/// Where the kernel has its huge pages of 2 MiB.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// The huge pages of a pod of 256 MiB.
const POD_PAGES: u64 = 128;

fn huge_pages(name: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("{HUGE_PAGES}/{name}"))?;
    Ok(text.trim().parse()?)
}

/// Sets how many there are on each node. The kernel may find fewer.
fn set_huge_pages(nodes: usize, each: u64) -> Result<()> {
    for node in 0..nodes {
        let path = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        std::fs::write(&path, each.to_string()).with_context(|| path.clone())?;
        let got = std::fs::read_to_string(&path)?;
        ensure!(got.trim() == each.to_string(), "{path}: {each} were set, {got} are there");
    }
    Ok(())
}

/// Pods in huge pages: the one for which there are too few is refused at once; the others have what they were promised.
async fn memory_in_huge_pages_is_reserved_and_on_one_node(case: Case) -> Result<()> {
    let nodes = nodes(&case)?.len();
    ensure!(huge_pages("nr_hugepages")? == 0, "this host has huge pages of its own");
    let done = pods_in_huge_pages(&case, nodes).await;
    case.clean_up().await?;
    set_huge_pages(nodes, 0)?;
    done
}

async fn pods_in_huge_pages(case: &Case, nodes: usize) -> Result<()> {
    let run = || async {
        let mut config = case.pod_config();
        config.annotations.insert("io.sandboxer.huge-pages".into(), "2Mi".into());
        anyhow::Ok(case.pod_of(&case.cri.run_pod(&config, "sandboxer").await?, config))
    };
    let refused = |outcome: Result<Pod>, free: u64| {
        let text = format!("{:#}", outcome.err().context("there are too few huge pages for it")?);
        let words =
            [&*format!("{POD_PAGES} huge pages of 2 MiB are needed and {free} are free"), HUGE_PAGES, "pod "];
        ensure!(words.iter().all(|words| text.contains(words)), "{text}");
        anyhow::Ok(())
    };
    refused(run().await, 0)?;

    // For one pod on each node, and half of another one.
    let each = POD_PAGES + POD_PAGES / 4;
    set_huge_pages(nodes, each)?;
    let all = each * nodes as u64;
    let mut pods = Vec::new();
    for _ in 0..nodes {
        let pod = run().await?;
        filled(&pod).await?;
        let place = place(case, &pod.id)?;
        ensure!(share(&place, Some(node_of(&place)?))? >= LOCAL, "{place}");
        let inspected = case.stack.cli_json(&["inspect", &pod.id])?;
        ensure!(inspected["start_path"] == "boot", "{inspected}");
        let maps = std::fs::read_to_string(format!("/proc/{}/smaps", case.vmm_of(&pod.id).await?))?;
        let kib = maps.lines().filter_map(|line| {
            line.strip_prefix("Shared_Hugetlb:").or(line.strip_prefix("Private_Hugetlb:"))
        });
        let kib: u64 =
            kib.filter_map(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).sum();
        ensure!(kib > 48_000, "{kib} KiB of the VMM are in huge pages");
        println!("node {}: {} of {} MiB in use", place["node"], kib >> 10, POD_PAGES * 2);
        pods.push(pod);
    }
    // Also what the guests have not touched yet.
    let free = huge_pages("free_hugepages")? - huge_pages("resv_hugepages")?;
    ensure!(free == all - POD_PAGES * nodes as u64, "{free} of {all} are free");
    refused(run().await, free)?;
    let other = u64::from(node_of(&place(case, &pods[0].id)?)? == 0).to_string();
    let moved =
        case.stack.command("sandboxer-cli").args(["place", "--move", &pods[0].id, &other]).output()?;
    let stderr = String::from_utf8_lossy(&moved.stderr).into_owned();
    ensure!(!moved.status.success() && stderr.contains("its memory is in huge pages"), "{stderr}");
    for pod in pods {
        case.remove(&pod.id).await?;
    }
    eventually("all huge pages are free", PATIENCE, || async {
        Ok((huge_pages("free_hugepages")? == all && huge_pages("resv_hugepages")? == 0).then_some(()))
    })
    .await
}

/// Neither a VM that boots for a pod nor one that waits, before and after a pod takes it.
async fn no_vmm_runs_on_reserved_cpus(case: Case) -> Result<()> {
    let cpus = std::thread::available_parallelism()?.get();
    ensure!(cpus >= 2, "this case needs two CPUs");
    let (reserved, rest) = match cpus {
        2 => (1, "0".to_owned()),
        cpus => (cpus - 1, format!("0-{}", cpus - 2)),
    };
    let earlier = case.pod().await?;
    // All, or those of its NUMA node.
    let before = cpus_of(case.vmm_of(&earlier.id).await?)?;
    let path = case.stack.dir().join("sandboxer/config.toml");
    let config = std::fs::read_to_string(&path)?;
    std::fs::write(
        &path,
        format!("{config}\n[placement]\npolicy = \"off\"\nreserved_cpus = \"{reserved}\"\n"),
    )?;
    case.stack.kill_worker()?;
    let outcome = check_other_cpus(&case, &earlier, &rest).await;
    std::fs::write(&path, &config)?;
    case.stack.kill_worker()?;
    outcome?;
    threads_say(case.vmm_of(&earlier.id).await?, "Cpus_allowed_list", &before).await.context("released again")
}

/// Returns the CPUs on which a process may run.
fn cpus_of(pid: Pid) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
    Ok(list.context("no Cpus_allowed_list")?.to_owned())
}

async fn check_other_cpus(case: &Case, earlier: &Pod, rest: &str) -> Result<()> {
    let says = |pid| threads_say(pid, "Cpus_allowed_list", rest);
    says(case.vmm_of(&earlier.id).await?).await.context("a pod of the daemon before")?;
    let booted = booted(case, 1).await?;
    says(case.vmm_of(&booted.id).await?).await.context("a pod whose VM booted")?;
    // The daemon that has just started may have to make a template before.
    let waiting = eventually("a VM that waits", PATIENCE * 5, || async {
        Ok(Some(case.stack.waiting()?).filter(|waiting| !waiting.is_empty()))
    });
    waiting.await?;
    pool_is_filled(case).await?;
    for vmm in case.stack.waiting()? {
        says(vmm).await.context("a VM that waits")?;
    }
    let pooled = case.pod().await?;
    says(case.vmm_of(&pooled.id).await?).await.context("a pod of the pool")?;
    ensure!(place(case, &pooled.id)?["cpus"] == *rest);
    ensure!(pooled.output("echo fine").await? == "fine");
    Ok(())
}
