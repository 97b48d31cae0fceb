//! Shared volumes, devices, and the termination message.

use sandboxer_protocol::agent::{
    AgentClient, BlockDevice, CreateContainerRequest, Directory, Entry, ListVolumesRequest, Owner,
    PutVolumeRequest, TmpfsUpper, Tree, entry::Kind, put_volume_request::Content,
};
use serde_json::{Value, json};
use ttrpc::Code;

use crate::{
    container::*,
    vm::{SCRATCH, Vm},
};

fn owner(mode: u32, uid: u32) -> Owner {
    Owner { mode, uid, gid: uid, ..Default::default() }
}

fn entry(path: &str, mode: u32, kind: Kind) -> Entry {
    Entry { path: path.into(), owner: Some(owner(mode, 1000)).into(), kind: Some(kind), ..Default::default() }
}

/// Returns kubelet's layout of one version of a file `key`.
fn version(name: &str, content: &str) -> Content {
    let entries = vec![
        entry(name, 0o755, Kind::Directory(Directory::new())),
        entry(&format!("{name}/key"), 0o444, Kind::File(content.into())),
        entry("..data", 0, Kind::Link(name.into())),
        entry("key", 0, Kind::Link("..data/key".into())),
    ];
    Content::Tree(Tree { entries, ..Default::default() })
}

async fn put(agent: &AgentClient, id: &str, content: Content) -> Result<(), ttrpc::Error> {
    let request = PutVolumeRequest {
        volume_id: id.into(),
        owner: Some(owner(0o1777, 7)).into(),
        content: Some(content),
        ..Default::default()
    };
    patiently(agent.put_volume(ctx(), &request)).await.map(drop)
}

/// Returns a container that runs `script` with volumes at paths.
fn with_volumes(id: &str, script: &str, volumes: &[(&str, &str)]) -> CreateContainerRequest {
    let mut spec = spec(shell(script));
    for (source, at) in volumes {
        let source = format!("/run/sandboxer/volumes/{source}");
        let mount: Value =
            json!({"destination": at, "type": "bind", "source": source, "options": ["rbind", "rw"]});
        spec["mounts"].as_array_mut().unwrap().push(mount);
    }
    container(id, &spec)
}

#[tokio::test]
async fn files_from_the_host_change_all_at_once() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    put(&agent, "settings", version("..1", "one")).await.unwrap();
    let script = "stat -c '%a %u' /s /s/..data/key; cat /s/key; echo; exec sleep 1000";
    let web = run(&agent, &with_volumes("web", script, &[("settings", "/s")])).await;
    let seen = web.until("", "one\n").await;
    assert_eq!(seen, "1777 7\n444 1000\none\n");
    put(&agent, "settings", version("..2", "two")).await.unwrap();
    let look = exec(&agent, "web", "look", &shell("cat /s/key; ls -A /s"), streams()).await;
    look.start().await.unwrap();
    assert_eq!(look.stdout().await, "two..2\n..data\nkey\n");
    let listed = patiently(agent.list_volumes(ctx(), &ListVolumesRequest::new())).await.unwrap();
    assert_eq!(listed.volume_ids, ["settings"]);
    let bad = Content::Tree(Tree {
        entries: vec![entry("../x", 0o600, Kind::File(Vec::new()))],
        ..Default::default()
    });
    let (code, words) = refusal(put(&agent, "settings", bad).await);
    assert!(code == Code::INVALID_ARGUMENT && words.contains("../x"), "{words}");
    end(&agent, "web").await;
}

#[tokio::test]
async fn space_is_shared_bounded_and_outlives_containers() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let memory = || Content::Memory(TmpfsUpper { size_bytes: 1 << 20, ..Default::default() });
    put(&agent, "mem", memory()).await.unwrap();
    put(&agent, "disk", Content::Disk(disk(SCRATCH, "ext4", false))).await.unwrap();
    let fills = "stat -c '%a %u' /m /d; ls -A /d; for at in /m /d; do dd if=/dev/zero of=$at/big bs=64k 2>&1 | grep -o 'No space left on device'; done; \
                 rm /m/big /d/big; echo kept >/m/note; echo kept >/d/note; ln -s / /d/out; ln -s /d/note /d/file";
    let one = run(&agent, &with_volumes("one", fills, &[("mem", "/m"), ("disk", "/d")])).await;
    assert_eq!(
        one.stdout().await,
        "1777 7\n1777 7\nNo space left on device\nNo space left on device\n",
        "{}",
        one.stderr().await
    );
    end(&agent, "one").await;

    // A repeated request changes nothing.
    put(&agent, "mem", memory()).await.unwrap();
    put(&agent, "disk", Content::Disk(disk(SCRATCH, "ext4", false))).await.unwrap();
    let parts = [("mem", "/m"), ("disk/a/b", "/ab"), ("disk/out", "/out"), ("disk/note", "/note")];
    let two =
        run(&agent, &with_volumes("two", "cat /m/note /note /out/note; stat -c %a /ab; ls /out", &parts))
            .await;
    assert_eq!(
        two.stdout().await,
        "kept\nkept\nkept\n1777\na\nfile\nnote\nout\n",
        "a link leads no further than the volume's root: {}",
        two.stderr().await
    );
    end(&agent, "two").await;
}

#[tokio::test]
async fn a_disk_is_a_device_at_the_path_asked_for() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let device = |path: &str, read_only| BlockDevice {
        serial: SCRATCH.into(),
        path: path.into(),
        owner: Some(owner(0o666, 5)).into(),
        read_only,
        ..Default::default()
    };
    let script = "for at in /dev/xvda /data/raw; do test -b $at && stat -c '%a %u' $at; done; \
                  echo data | dd of=/dev/xvda bs=512 seek=100 conv=notrunc,fsync 2>/dev/null; dd if=/data/raw bs=512 skip=100 count=1 2>/dev/null | head -1";
    let mut request = container("web", &spec(shell(script)));
    request.block_devices = vec![device("/dev/xvda", false), device("/data/raw", true)];
    let web = run(&agent, &request).await;
    assert_eq!(web.stdout().await, "666 5\n666 5\ndata\n", "{}", web.stderr().await);
    end(&agent, "web").await;
    request.block_devices = vec![device("relative", false)];
    let (code, words) = refusal(patiently(agent.create_container(ctx(), &request)).await);
    assert!(code == Code::INVALID_ARGUMENT && words.contains("relative"), "{words}");
}

#[tokio::test]
async fn the_end_of_a_containers_message_comes_with_its_exit() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let script = "head -c 5000 /dev/zero | tr '\\0' x >/dev/termination-log; echo the end >>/dev/termination-log; exit 3";
    let mut request = container("web", &spec(shell(script)));
    let mut message = file("/dev/termination-log", "", false);
    message.is_message = true;
    request.files = vec![file("/etc/other", "no message", true), message];
    let web = run(&agent, &request).await;
    let exit = web.wait().await;
    assert_eq!((exit.code, exit.message.len()), (3, 4096), "{}", web.stderr().await);
    assert!(exit.message.ends_with(b"xthe end\n"));
    end(&agent, "web").await;
}
