//! Input, output and terminals.

use sandboxer_protocol::agent::{OutputStream, ResizeTerminalRequest};
use ttrpc::Code;

use crate::{container::*, vm::Vm};

#[tokio::test]
async fn output_is_repeated_until_it_is_acknowledged() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let web = run(&agent, &container("web", &spec(shell("printf abcdef; read x; printf $x")))).await;
    web.until("", "abcdef").await;
    for _ in 0..2 {
        assert_eq!(web.read(OutputStream::STDOUT, 2, 3).await.unwrap(), (b"cde".to_vec(), false));
    }
    let (code, words) = refusal(web.read(OutputStream::STDOUT, 1, 3).await);
    assert_eq!((code, words.contains("before offset 2")), (Code::INVALID_ARGUMENT, true), "{words}");
    let (code, words) = refusal(web.read(OutputStream::STDOUT, 7, 3).await);
    assert_eq!((code, words.contains("6 bytes so far")), (Code::INVALID_ARGUMENT, true), "{words}");

    assert_eq!(web.write(0, b"gh", false).await.unwrap(), 2);
    assert_eq!(web.write(0, b"ghi", false).await.unwrap(), 3, "bytes it has are skipped");
    let (code, _) = refusal(web.write(9, b"x", false).await);
    assert_eq!(code, Code::INVALID_ARGUMENT, "a gap is refused");
    assert_eq!(web.write(3, b"\n", true).await.unwrap(), 4);
    assert_eq!(web.wait().await.code, 0);
    assert_eq!(web.read(OutputStream::STDOUT, 6, 0).await.unwrap(), (b"ghi".to_vec(), true));
    assert_eq!(web.read(OutputStream::STDOUT, 9, 0).await.unwrap(), (vec![], true));
    assert_eq!(web.stderr().await, "");
    end(&agent, "web").await;
}

#[tokio::test]
async fn a_process_nobody_reads_waits_and_one_that_reads_nothing_makes_its_writer_wait() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let talker =
        run(&agent, &container("talker", &spec(shell("yes | head -c 1000000; echo done >&2")))).await;
    talker.read(OutputStream::STDOUT, 0, 1).await.unwrap();
    let silent =
        tokio::time::timeout(std::time::Duration::from_secs(2), talker.read(OutputStream::STDERR, 0, 1))
            .await;
    assert!(silent.is_err(), "a megabyte went nowhere");
    assert_eq!(talker.stdout().await.len(), 1_000_000);
    assert_eq!(talker.stderr().await, "done\n");
    assert_eq!(talker.wait().await.code, 0);

    let reader = run(&agent, &container("reader", &spec(shell("sleep 1000 & wait $!; wc -c")))).await;
    let input = vec![b'x'; 300_000];
    let blocked =
        tokio::time::timeout(std::time::Duration::from_secs(2), reader.write(0, &input, true)).await;
    assert!(blocked.is_err(), "more than a pipe was taken");
    // The other exec ends the sleep; input that was taken is not taken twice.
    let killer = exec(&agent, "reader", "killer", &shell("killall sleep"), streams()).await;
    killer.start().await.unwrap();
    assert_eq!(killer.wait().await.code, 0, "{}", killer.stderr().await);
    assert_eq!(reader.write(0, &input, true).await.unwrap(), 300_000);
    assert_eq!(reader.stdout().await, "300000\n");
    for id in ["talker", "reader"] {
        end(&agent, id).await;
    }
}

#[tokio::test]
async fn a_child_that_outlives_its_parent_does_not_hold_the_end_back() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    run(&agent, &container("web", &spec(shell("sleep 1000")))).await;
    let parent = exec(&agent, "web", "parent", &shell("echo early; sleep 1000 & echo late"), streams()).await;
    parent.start().await.unwrap();
    assert_eq!(parent.wait().await.code, 0);
    assert_eq!(parent.stdout().await, "early\nlate\n");
    assert_eq!(parent.stderr().await, "");
    end(&agent, "web").await;
}

#[tokio::test]
async fn a_terminal_echoes_resizes_and_ends() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let mut request = container("tty", &spec(command(&["sh"])));
    request.stdio = Some(terminal()).into();
    let tty = run(&agent, &request).await;
    let resize = async |exec: &str, columns: u32, rows: u32| {
        let request = ResizeTerminalRequest {
            container_id: "tty".into(),
            exec_id: exec.into(),
            columns,
            rows,
            ..Default::default()
        };
        patiently(agent.resize_terminal(ctx(), &request)).await
    };
    resize("", 91, 33).await.unwrap();
    tty.write(0, b"stty size; tty; exit 3\n", false).await.unwrap();
    let seen = tty.stdout().await;
    assert!(seen.contains("33 91") && seen.contains("/dev/"), "{seen}");
    assert_eq!(tty.wait().await.code, 3);
    end(&agent, "tty").await;

    let mut request = container("tty", &spec(command(&["sh"])));
    request.stdio = Some(terminal()).into();
    let tty = run(&agent, &request).await;
    let inner = exec(&agent, "tty", "inner", &command(&["sh"]), terminal()).await;
    let (code, _) = refusal(resize("inner", 80, 24).await);
    assert_eq!(code, Code::FAILED_PRECONDITION, "it has not been started");
    inner.start().await.unwrap();
    resize("inner", 44, 22).await.unwrap();
    // The interrupt character reaches the foreground process, as on any terminal. One process does both: a shell of the terminal that
    // is interrupted between two commands goes on to the second.
    inner.write(0, b"sh -c 'stty size; sleep 1000'\n", false).await.unwrap();
    let seen = inner.until("", "22 44").await;
    inner.write(30, b"\x03", false).await.unwrap();
    // The shell drops input before its next prompt.
    let seen = inner.until(&seen, "^C\r\n/ # ").await;
    inner.write(31, b"echo sur''vived; exit 4\n", false).await.unwrap();
    inner.until(&seen, "survived").await;
    assert_eq!(inner.wait().await.code, 4);
    // The end of its input hangs it up: `cat` ends.
    let script = ["sh", "-c", "trap '' HUP; echo reads; cat; exit 6"];
    let reads = exec(&agent, "tty", "reads", &command(&script), terminal()).await;
    reads.start().await.unwrap();
    // Before that it has no trap, and the hang-up ends it.
    reads.until("", "reads").await;
    reads.write(0, b"", true).await.unwrap();
    assert_eq!(reads.wait().await.code, 6);
    let _ = tty;
    end(&agent, "tty").await;
}
