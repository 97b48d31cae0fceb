"""Exercises the chart's installer on a throw-away node: install, remove, twice, killed at every step, refused. Needs root.

The image and the installer are real, also the daemon that reads the configuration and containerd that reads its own; systemd,
the running daemon and the API server are doubles. Run by `make test-chart`, which sets CONTAINERD.
"""

import hashlib
import http.server
import json
import os
import shutil
import ssl
import stat
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path

import test_chart

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CONTAINERD = Path(os.environ["CONTAINERD"])
PREFIX = "opt/sandboxer"
# Commands at which the installer is killed.
KILLING = ("mv", "mkdir", "chmod", "rm", "rmdir", "nsenter", "sync", "cat")
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"


def copy_program(program, root, to):
    """Copies a program into a root, with the libraries that it is linked with."""
    destination = root / to
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, destination)
    linked = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    for word in linked.split():
        if word.startswith("/"):
            library = root / word[1:]
            library.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(word), library)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Host:
    """A node and the installer's image, in a directory."""

    def __init__(self, directory, image):
        self.node = directory / "node"
        self.image = image
        self.digests = {}
        self.shell = ()
        self.make_node()
        self.write_files(test_chart.IMAGE)
        self.before = self.listing()

    def make_node(self):
        for name in ("proc", "tmp", "run", "var/lib", "sys", "dev", "usr/bin", "usr/local/bin", "etc/systemd/system/multi-user.target.wants"):
            (self.node / name).mkdir(parents=True)
        os.mknod(self.node / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        shutil.copy(shutil.which("busybox"), self.node / "usr/bin/busybox")
        for applet in ("sh", "cat", "ls", "ln", "mkdir", "touch", "test", "find", "rmdir", "sleep", "umount", "echo"):
            (self.node / "usr/bin" / applet).symlink_to("busybox")
        (self.node / "bin").symlink_to("usr/bin")
        # As a node has them: busybox' own do not know all options.
        for name in ("rm", "env"):
            copy_program(shutil.which(name), self.node, f"usr/bin/{name}")
        # Its libraries are there for the daemon too.
        copy_program(self.image / "payload/bin/sandboxer", self.node, "tmp/sandboxer")
        (self.node / "tmp/sandboxer").unlink()
        copy_program(CONTAINERD, self.node, "usr/local/bin/containerd")
        for name in ("qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4"):
            script(self.node / "usr/bin" / name, "#!/bin/sh\n")
        shutil.copy(HERE / "node-double/systemctl", self.node / "usr/bin/systemctl")
        default = subprocess.run([CONTAINERD, "config", "default"], capture_output=True, text=True, check=True).stdout
        (self.node / "etc/containerd").mkdir()
        (self.node / "etc/containerd/config.toml").write_text(default)

    def write_files(self, values):
        """Renders the chart with these values, for the next run."""
        for name, text in test_chart.files_of(values).items():
            (self.image / "files" / name).write_text(text)
        daemon_set = test_chart.only(test_chart.template(values), "DaemonSet")
        env = daemon_set["spec"]["template"]["spec"]["containers"][0]["env"]
        self.env = {each["name"]: each["value"] for each in env if "value" in each}

    def command(self, env, *arguments):
        settings = (f"{name}={value}" for name, value in env.items())
        return [HERE / "on_node.sh", self.node, self.image, *settings, "--", *self.shell, "/installer", *arguments]

    def run(self, *arguments, **settings):
        (self.node / "tmp/calls").unlink(missing_ok=True)
        env = {**self.env, **settings}
        command = self.command(env, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    def calls(self):
        path = self.node / "tmp/calls"
        return path.read_text().splitlines() if path.exists() else []

    def listing(self):
        """Returns every path of the node with its kind, mode and content, but those in /tmp."""
        found = {}
        for path in sorted(self.node.rglob("*")):
            name = path.relative_to(self.node)
            if name.parts[0] == "tmp":
                continue
            state = path.lstat()
            content = os.readlink(path) if path.is_symlink() else ""
            if stat.S_ISREG(state.st_mode):
                content = self.digest(path, state)
            found[str(name)] = (stat.filemode(state.st_mode), content)
        return found

    def digest(self, path, state):
        """Returns the hash of a file; of one that was not changed since, the one that is known."""
        key = (state.st_ino, state.st_mtime_ns, state.st_size)
        if key not in self.digests:
            self.digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.digests[key]

    def kill_at(self, number):
        """Makes the next run end at the call of this number. In another shell, since busybox' runs its own commands."""
        copy_program(shutil.which("dash"), self.image, "bin/dash")
        self.shell = ("/bin/dash",)
        (self.image / "tmp/kill-at").write_text(str(number))
        (self.image / "tmp/count").unlink(missing_ok=True)
        for name in KILLING:
            path = self.image / "bin" / name
            path.unlink()
            shutil.copy(HERE / "node-double/killing", path)

    def kill_no_more(self):
        self.shell = ()
        for name in KILLING:
            path = self.image / "bin" / name
            path.unlink()
            path.symlink_to("busybox")


def setUpModule():
    """Builds the image, once."""
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    OnNode.real = Path(directory.name) / "image"
    subprocess.run([ROOT / "scripts/installer-image.sh", "--tree", OnNode.real], check=True)


class OnNode(unittest.TestCase):
    real: Path

    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        image = Path(self.scratch.name) / "image"
        # Small files stand for the guest image, so that it can be copied often.
        large = shutil.ignore_patterns("vmlinux", "initramfs.cpio", "sandboxer-cli")
        shutil.copytree(OnNode.real, image, symlinks=True, ignore=large)
        (image / "payload/lib").mkdir(exist_ok=True)
        for name in ("vmlinux", "initramfs.cpio"):
            (image / "payload/lib" / name).write_text(name)
        shutil.copy(HERE / "node-double/sandboxer-cli", image / "payload/bin/sandboxer-cli")
        self.host = Host(Path(self.scratch.name), image)

    def installs(self, **settings):
        status, errors = self.host.run("install", **settings)
        self.assertEqual(status, 0, errors)
        return errors

    def removes(self):
        status, errors = self.host.run("remove")
        self.assertEqual(status, 0, errors)

    def refuses(self, *texts, what="install", **settings):
        status, errors = self.host.run(what, **settings)
        self.assertNotEqual(status, 0, errors)
        for text in texts:
            self.assertIn(text, errors)

    def assert_nothing_is_left(self):
        self.assertEqual(self.host.listing(), self.host.before)

    def assert_installed(self):
        node = self.host.node
        for name in ("bin/sandboxer", "bin/sandboxer-front", "bin/sandboxer-cli", "bin/sandboxer-share", "bin/containerd-shim-sandboxer-v1"):
            self.assertTrue(os.access(node / PREFIX / name, os.X_OK), name)
        self.assertEqual((node / PREFIX / "lib/vmlinux").read_text(), "vmlinux")
        unit = (node / "etc/systemd/system/sandboxer.service").read_text()
        self.assertIn("ExecStart=/opt/sandboxer/bin/sandboxer\n", unit)
        self.assertNotIn("/usr/bin", unit)
        self.assertTrue((node / "etc/systemd/system/multi-user.target.wants/sandboxer.service").is_symlink())
        self.assertTrue((node / "etc/sandboxer/config.toml").exists())
        self.assertTrue((node / "etc/containerd/conf.d/sandboxer.toml").exists())
        self.assertTrue((node / "run/daemon-double").exists())
        self.assertEqual([name for name in self.host.listing() if name.endswith("sandboxer-new")], [])


class Installer(OnNode):
    def test_the_image_has_what_make_install_yields(self):
        """The real payload, not the small one."""
        for name in ("bin/sandboxer", "bin/sandboxer-cli", "lib/vmlinux", "lib/initramfs.cpio", "sandboxer.service", "share/LICENSE"):
            self.assertTrue((OnNode.real / "payload" / name).is_file(), name)

    def test_install_and_remove(self):
        self.installs()
        self.assert_installed()
        calls = self.host.calls()
        for call in ("daemon-reload", "--quiet enable sandboxer.service", "start sandboxer.service", "restart containerd"):
            self.assertIn(call, calls)
        self.assertLess(calls.index("start sandboxer.service"), calls.index("restart containerd"))
        self.removes()
        self.assertIn("restart containerd", self.host.calls())
        self.assert_nothing_is_left()

    def test_twice(self):
        self.installs()
        self.installs()
        self.assert_installed()
        for call in ("start sandboxer.service", "reload sandboxer.service", "restart containerd"):
            self.assertNotIn(call, self.host.calls(), "nothing has changed")
        self.removes()
        self.removes()
        self.assertEqual(self.host.calls(), [], "nothing was installed")
        self.assert_nothing_is_left()

    def test_a_changed_configuration_is_loaded_without_a_restart(self):
        self.installs()
        self.host.write_files(test_chart.merged(test_chart.IMAGE, {"installer": {"config": {"pool": {"max": 8}}}}))
        self.installs()
        self.assertIn("reload sandboxer.service", self.host.calls())
        self.assertNotIn("restart containerd", self.host.calls())
        self.assertIn("max = 8", (self.host.node / "etc/sandboxer/config.toml").read_text())

    def test_a_later_version(self):
        self.installs()
        payload = self.host.image / "payload"
        (payload / "share/LICENSE").rename(payload / "share/COPYING")
        (payload / "lib/vmlinux").write_text("later")
        self.installs()
        self.assertIn("reload sandboxer.service", self.host.calls())
        self.assertFalse((self.host.node / PREFIX / "share/LICENSE").exists(), "a file of the earlier version")
        self.assertEqual((self.host.node / PREFIX / "lib/vmlinux").read_text(), "later")
        self.removes()
        self.assert_nothing_is_left()

    def test_a_new_runtime_class_restarts_containerd(self):
        self.installs()
        self.host.write_files(test_chart.merged(test_chart.IMAGE, test_chart.TWO_CLASSES))
        # Its VMM is named, so it is needed.
        self.refuses("this node lacks firecracker")
        script(self.host.node / "usr/bin/firecracker", "#!/bin/sh\n")
        self.installs()
        self.assertIn("restart containerd", self.host.calls())

    def test_a_bad_node_is_refused_before_anything_is_changed(self):
        def overwrite(name, text):
            return lambda node: script(node / name, text)

        def without(name):
            return lambda node: (node / name).unlink()

        drop_in = "etc/containerd/conf.d/sandboxer.toml"
        cases = (
            (overwrite("var/lib/dpkg/info/sandboxer.list", ""), "has the Debian package sandboxer"),
            (overwrite(drop_in, "mine"), f"files are in the way that this installer did not make; remove them: /{drop_in}"),
            (without("usr/bin/mkfs.erofs"), "this node lacks mkfs.erofs"),
            (without("usr/bin/qemu-system-x86_64"), "lacks qemu-system-x86_64-microvm or qemu-system-x86_64 or cloud-hypervisor"),
            (overwrite("tmp/no-containerd", ""), "containerd does not run on this node"),
            (overwrite("etc/containerd/config.toml", "not TOML"), "containerd cannot read /etc/containerd/config.toml"),
            (overwrite("usr/local/bin/containerd", "#!/bin/sh\necho containerd containerd.io 1.7.27 05044ec"), "1.7.27 05044ec': sandboxer needs containerd 2.4"),
            (without("usr/bin/systemctl"), "cannot run systemctl"),
        )
        for spoil, text in cases:
            with self.subTest(text):
                self.setUp()
                spoil(self.host.node)
                self.host.before = self.host.listing()
                self.refuses(text)
                self.assert_nothing_is_left()

    def test_a_configuration_that_the_daemon_refuses_is_not_switched_to(self):
        self.installs()
        before = self.host.listing()
        config = self.host.image / "files/config.toml"
        config.write_text(config.read_text() + "[imagine]\n")
        self.refuses("imagine", "the daemon refuses its configuration")
        after = {name: of for name, of in self.host.listing().items() if not name.endswith(".sandboxer-new")}
        self.assertEqual(after, before)
        self.removes()
        self.assert_nothing_is_left()

    def test_containerd_that_does_not_import_the_drop_in_is_not_restarted(self):
        config = self.host.node / "etc/containerd/config.toml"
        text = config.read_text()
        config.write_text("\n".join(line for line in text.splitlines() if not line.startswith("imports")))
        self.refuses("containerd does not read /etc/containerd/conf.d/sandboxer.toml: add imports")
        self.assertNotIn("restart containerd", self.host.calls())
        # The node is mended; the next try of the same container goes on.
        config.write_text(text)
        self.installs()
        self.assertIn("restart containerd", self.host.calls())
        self.removes()
        self.assert_nothing_is_left()

    def test_a_daemon_that_does_not_start_is_said(self):
        (self.host.node / "tmp/start-fails").touch()
        self.refuses("the daemon did not start")
        self.removes()
        self.assert_nothing_is_left()

    def test_a_removal_under_pods_is_refused(self):
        self.installs()
        installed = self.host.listing()
        (self.host.node / "tmp/pods").write_text("5a1de5\n")
        self.refuses("not removed: pods run (double): 5a1de5", what="remove")
        self.assertEqual(self.host.listing(), installed)
        (self.host.node / "tmp/pods").unlink()
        # The daemon is gone, a VM is left.
        (self.host.node / "run/daemon-double").unlink()
        (self.host.node / "tmp/beside").write_text("a VM")
        self.refuses("the daemon does not answer, and VMs run", what="remove")
        (self.host.node / "tmp/beside").unlink()
        self.removes()
        self.assert_nothing_is_left()

    def test_for_a_pod_that_starts_during_a_removal_the_daemon_comes_back(self):
        self.installs()
        (self.host.node / "tmp/late").touch()
        self.refuses("not removed: the daemon does not answer, and VMs run (double): late", what="remove")
        self.assertEqual(self.host.calls()[-1], "--quiet enable --now sandboxer.service")
        self.assertTrue((self.host.node / "opt/sandboxer/bin/sandboxer").exists())
        for name in ("late", "beside"):
            (self.host.node / "tmp" / name).unlink()
        self.removes()
        self.assert_nothing_is_left()

    def killed(self, what):
        """Kills a run at each of its commands; yields after each, until one run comes to its end."""
        for number in range(1, 2000):
            self.host.kill_at(number)
            status, errors = self.host.run(what)
            self.host.kill_no_more()
            if status == 0:
                self.assertGreater(number, 20, "it was hardly ever killed")
                return
            self.assertEqual(status, 137, errors)
            yield number

    def test_an_installation_that_is_killed_anywhere_can_be_removed(self):
        for number in self.killed("install"):
            with self.subTest(killed_at=number):
                self.removes()
                self.assert_nothing_is_left()
        self.removes()
        self.assert_nothing_is_left()

    def test_an_installation_that_is_killed_anywhere_can_be_completed(self):
        self.installs()
        complete = self.host.listing()
        self.removes()
        for number in self.killed("install"):
            with self.subTest(killed_at=number):
                restarted = "restart containerd" in self.host.calls()
                self.installs()
                self.assertEqual(self.host.listing(), complete)
                # What was switched before is not forgotten.
                self.assertTrue(restarted or "restart containerd" in self.host.calls())
                self.removes()
        self.removes()

    def test_a_removal_that_is_killed_anywhere_can_be_completed(self):
        self.installs()
        for number in self.killed("remove"):
            with self.subTest(killed_at=number):
                self.removes()
                self.assert_nothing_is_left()
                self.installs()
        self.assert_nothing_is_left()


class ApiServerDouble:
    """A double of the API server: one node, one DaemonSet with two nodes, whose pods change when it is patched."""

    def __init__(self, directory):
        self.labels, self.patches, self.refuse_with = {}, [], None
        self.waits = 3
        key, certificate = directory / "key.pem", directory / "ca.crt"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
             "-subj", "/CN=double", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
            check=True, capture_output=True)
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PATCH(self):
                double.patched(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def do_GET(self):
                double.daemon_set(self)

            def answer(self, status, body):
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.certificate = certificate
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def patched(self, request, body):
        if request.headers["Authorization"] != "Bearer secret":
            return request.answer(401, {"message": "who are you"})
        if self.refuse_with:
            return request.answer(self.refuse_with, {"message": "refused by the double"})
        self.patches.append((request.path, body))
        if request.path == "/api/v1/nodes/node-1":
            for name, value in body["metadata"]["labels"].items():
                self.labels.pop(name, None) if value is None else self.labels.update({name: value})
            return request.answer(200, {"kind": "Node"})
        return self.daemon_set(request)

    def daemon_set(self, request):
        self.waits -= 1
        updated = 2 if self.waits < 0 else 1
        status = {"desiredNumberScheduled": 2, "updatedNumberScheduled": updated, "numberReady": updated, "observedGeneration": 7}
        return request.answer(200, {"kind": "DaemonSet", "metadata": {"generation": 7}, "status": status})


class InKubernetes(OnNode):
    """The pod's life, with a double of the API server."""

    def setUp(self):
        super().setUp()
        directory = Path(self.scratch.name)
        self.api = ApiServerDouble(directory)
        self.addCleanup(self.api.server.server_close)
        self.addCleanup(self.api.server.shutdown)
        account = self.host.image / ACCOUNT
        account.mkdir(parents=True)
        (account / "token").write_text("secret")
        shutil.copy(self.api.certificate, account / "ca.crt")
        self.settings = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.api.port), "NODE": "node-1"}

    def pod(self, mode, until):
        """Runs the pod until something holds, and then ends it as kubelet does; returns what it said."""
        env = {**self.host.env, **self.settings, "MODE": mode}
        command = self.host.command(env, "run")
        pod = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            for _ in range(300):
                if until() or pod.poll() is not None:
                    break
                threading.Event().wait(0.1)
            self.assertTrue(until(), "not within 30 s")
        finally:
            pod.kill()
            said = pod.communicate()[0]
        return said

    def is_done(self):
        return (self.host.image / "tmp/done").exists()

    def test_a_pod_installs_and_labels_its_node(self):
        self.pod("install", lambda: self.is_done() and self.api.labels)
        self.assert_installed()
        self.assertEqual(self.api.labels, {"io.sandboxer/node": "ready"})
        self.pod("remove", lambda: self.is_done() and not self.api.labels)
        self.assert_nothing_is_left()

    def test_a_node_with_pods_loses_its_label_and_is_removed_later(self):
        self.pod("install", lambda: self.is_done() and self.api.labels)
        (self.host.node / "tmp/pods").write_text("5a1de5\n")
        cleared = []

        def until():
            if not self.api.labels and not cleared and not self.is_done():
                cleared.append(True)
                threading.Timer(1, (self.host.node / "tmp/pods").unlink).start()
            return cleared and self.is_done()

        said = self.pod("remove", until)
        self.assertIn("pods run", said)
        self.assert_nothing_is_left()

    def test_the_removal_of_all_nodes_is_waited_for(self):
        status, errors = self.host.run("remove-everywhere", "sandboxer", "sbx-installer", **self.settings)
        self.assertEqual(status, 0, errors)
        self.assertIn("removed from 1 of 2 nodes", errors)
        self.assertIn("removed from 2 nodes", errors)
        (path, patch), = self.api.patches
        self.assertEqual(path, "/apis/apps/v1/namespaces/sandboxer/daemonsets/sbx-installer")
        self.assertEqual(patch["spec"]["template"]["metadata"]["annotations"], {"io.sandboxer/mode": "remove"})

    def test_a_refusal_of_the_api_server_is_said(self):
        self.api.refuse_with = 403
        status, errors = self.host.run("remove-everywhere", "sandboxer", "sbx-installer", **self.settings)
        self.assertEqual(status, 1)
        self.assertIn("cannot change DaemonSet sandboxer/sbx-installer", errors)
        self.assertIn("refused by the double", errors)


if __name__ == "__main__":
    unittest.main(verbosity=2)
