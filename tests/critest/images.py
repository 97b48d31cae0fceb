#!/usr/bin/env python3
"""The images that critest pulls, made from the host's static busybox, and a registry for them on loopback that only answers pulls.
usage: images.py PORT      serves until it is killed; needs busybox-static and gcc"""

import hashlib
import http.server
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

CRI_TOOLS = "k8s-staging-cri-tools/"
E2E = "e2e-test-images/"
ENV = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]

PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\n"
    "default-user:x:1000:1000::/:/bin/sh\n"
    "www-data:x:1002:33::/:/bin/sh\n"
    "nobody:x:65534:65534::/:/bin/false\n"
)
# A user of the group that a case expects among those of its process.
GROUP = "root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\nextra:x:50000:default-user\nnogroup:x:65534:\n"

# A case looks for a process and a file of this name. It stays the parent, since busybox would take the name for one of its programs.
NGINX = "#!/bin/sh\necho $$ >/var/run/nginx.pid\nhttpd -f -p {port} -h /www &\nwait\n"
# A case looks for this word in the log.
HTTPD = "#!/bin/sh\necho httpd on port 80\nhttpd -f -p 80 -h /www &\nwait\n"

PRINTS_ITS_USER = '#include <stdio.h>\n#include <unistd.h>\nint main(void) { printf("Effective uid: %d\\n", geteuid()); return 0; }\n'

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def setuid_program():
    """Returns the program of the cases about no_new_privs."""
    with tempfile.TemporaryDirectory() as work:
        source, program = pathlib.Path(work, "uid.c"), pathlib.Path(work, "uid")
        source.write_text(PRINTS_ITS_USER)
        subprocess.run(["gcc", "-Os", "-s", "-static", "-o", program, source], check=True)
        return program.read_bytes()


def busybox_files():
    """Returns files, as path: (content, mode), and hard links, as path: target, of a small system."""
    path = shutil.which("busybox") or sys.exit("no busybox: apt-get install busybox-static")
    programs = subprocess.run([path, "--list"], check=True, capture_output=True, text=True).stdout.split()
    files = {
        "bin/busybox": (pathlib.Path(path).read_bytes(), 0o755),
        "etc/passwd": (PASSWD.encode(), 0o644),
        "etc/group": (GROUP.encode(), 0o644),
        "www/index.html": (b"<title>It works</title>\n", 0o644),
    }
    # What Debian's busybox lacks.
    scripts = {"pgrep": b'#!/bin/sh\nexec pidof "$@"\n', "ipcs": b"#!/bin/sh\ncat /proc/sysvipc/shm\n"}
    files.update({f"bin/{name}": (script, 0o755) for name, script in scripts.items() if name not in programs})
    # No symbolic links: a case hides one program and uses another.
    links = {f"bin/{name}": "bin/busybox" for name in programs if name != "busybox"}
    return files, links


def layer(files, links):
    """Returns a tar archive, equal for equal files."""
    names = [*files, *links, "tmp/", "proc/", "sys/", "dev/", "root/", "run/", "var/run/"]
    dirs = sorted({str(parent) for name in names for parent in pathlib.PurePath(name + "x").parents} - {"."})
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in dirs:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name, (data, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
        for name, target in sorted(links.items()):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = tarfile.LNKTYPE, target, 0o755
            archive.addfile(entry)
    return out.getvalue()


class Store:
    """Blobs by digest, and manifests by name and tag."""

    def __init__(self):
        self.blobs, self.tags = {}, {}

    def blob(self, kind, data):
        """Keeps a blob and returns its descriptor."""
        self.blobs[digest(data)] = (kind, data)
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    def image(self, names, config, files, links):
        """Keeps an image under names with tags; its config differs by its first name, so that no two images are one."""
        content = layer(files, links)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ENV, "Labels": {"name": names[0]}, **config},
            "rootfs": {"type": "layers", "diff_ids": [digest(content)]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.blob(CONFIG, json.dumps(config).encode()),
            "layers": [self.blob(LAYER, content)],
        }
        manifest = self.blob(MANIFEST, json.dumps(manifest).encode())["digest"]
        self.tags.update({tuple(name.split(":")): manifest for name in names})


def fill(store):
    """Makes all images."""
    files, links = busybox_files()
    # A case looks for the last words in the command line of process 1.
    shell, web = {"Cmd": ["sh"]}, {"Cmd": ["/bin/nginx", "master process"], "ExposedPorts": {"80/tcp": {}}}

    def image(names, config=shell, more=None):
        store.image(names, config, {**files, **(more or {})}, links)

    image([E2E + "busybox:1.29-2"])
    image(["pause:3.9"], {"Entrypoint": ["/bin/sleep", "2147483647"]})
    image([E2E + "nginx:1.14-2"], web, {"bin/nginx": (NGINX.format(port=80).encode(), 0o755)})
    image([E2E + "httpd:2.4.39-4"], {"Cmd": ["/bin/serve"]}, {"bin/serve": (HTTPD.encode(), 0o755)})
    image([CRI_TOOLS + "hostnet-nginx-amd64:latest"], web, {"bin/nginx": (NGINX.format(port=12003).encode(), 0o755)})
    image([E2E + "nonewprivs:1.3"], {"Entrypoint": ["/uid"]}, {"uid": (setuid_program(), 0o4755)})
    for name in ("latest:latest", "tag:test", "tag:all", "1:latest", "2:latest", "3:latest"):
        image([f"{CRI_TOOLS}test-image-{name}"])
    image([f"{CRI_TOOLS}test-image-tags:{tag}" for tag in "123"])
    users = {"uid": "1002", "username": "www-data", "uid-group": "1003:1003", "username-group": "www-data:www-data"}
    for name, user in users.items():
        image([f"{CRI_TOOLS}test-image-user-{name}:latest"], {**shell, "User": user})
    image([CRI_TOOLS + "test-image-predefined-group:latest"], {**shell, "User": "1000"})


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD of manifests and blobs."""

    protocol_version = "HTTP/1.1"
    store = Store()

    def find(self):
        """Returns the type and content of what is asked for."""
        if self.path == "/v2/":
            return "application/json", b"{}"
        asked = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/?]+)(\?.*)?", self.path)
        if not asked:
            return None
        name, _, reference, _ = asked.groups()
        return self.store.blobs.get(self.store.tags.get((name, reference), reference))

    def do_GET(self):
        found = self.find()
        kind, data = found or ("application/json", b'{"errors":[{"code":"NOT_FOUND"}]}')
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Content-Digest", digest(data))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, text, *values):
        """Prints only what is not there."""
        if len(values) > 1 and values[1] == "404":
            print("no such image:", self.path, file=sys.stderr, flush=True)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    fill(Handler.store)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
