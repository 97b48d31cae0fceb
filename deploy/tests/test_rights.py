"""Asks a real API server what the chart's accounts may do: the rendered roles by RBAC, and the rendered admission policies by requests that
have to pass and requests that have to be refused. A token on a node is everybody's who is root there.

API server and etcd are real, in the tests' network namespace; no kubelet and no controller runs, and nodes and pods are objects alone.
Run by `make test-rights`, which sets HELM, APISERVER and ETCD. Needs root.
"""

import contextlib
import copy
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import test_chart

NAMESPACE = "sandboxer"
INSTALLER, REMOVER = "sbx-installer", "sbx-installer-remove"
LABEL = "io.sandboxer/node"
MERGE, STRATEGIC, JSON_PATCH, APPLY = (f"application/{kind}" for kind in (
    "merge-patch+json", "strategic-merge-patch+json", "json-patch+json", "apply-patch+yaml"))
# Verbs of RBAC that are no requests of their own.
OF_RBAC = ["bind", "escalate", "impersonate", "approve", "sign", "attest", "use"]
VERBS = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", *OF_RBAC]
# What every service account may do, by the API server's own roles: ask about itself, and read what the server is.
EVERYONES = {("authorization.k8s.io", "selfsubjectaccessreviews", "create"), ("authorization.k8s.io", "selfsubjectrulesreviews", "create"),
             ("authentication.k8s.io", "selfsubjectreviews", "create")}
EVERYONES_PATHS = {"/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz", "/version", "/version/",
                   "/.well-known/openid-configuration", "/.well-known/openid-configuration/", "/openid/v1/jwks", "/openid/v1/jwks/"}
PLURALS = {"ServiceAccount": "serviceaccounts", "ConfigMap": "configmaps", "ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings",
           "Role": "roles", "RoleBinding": "rolebindings", "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
           "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings", "DaemonSet": "daemonsets", "Job": "jobs",
           "RuntimeClass": "runtimeclasses", "Namespace": "namespaces", "Node": "nodes", "Pod": "pods"}
OF_CLUSTER = {"ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "RuntimeClass", "Namespace", "Node"}


class Client:
    """One connection with one token."""

    def __init__(self, port, token):
        context = ssl.create_default_context()
        # The server made its certificate itself, and nobody else is in this network namespace.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
        self.token = token

    def ask(self, method, path, body=None, kind="application/json"):
        """Returns the answer's status and its object."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.connection.getresponse()
        text = answer.read()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode()

    def do(self, *request):
        """Asks for what has to succeed."""
        status, answer = self.ask(*request)
        assert status < 300, (request[:2], status, answer)
        return answer


def path_of(document, name=True):
    """Returns the path of an object, or of those of its kind."""
    version, kind, meta = document["apiVersion"], document["kind"], document["metadata"]
    parts = ["api" if version == "v1" else "apis", version]
    if kind not in OF_CLUSTER:
        parts += ["namespaces", meta["namespace"]]
    return "/" + "/".join([*parts, PLURALS[kind], *([meta["name"]] if name else [])])


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Cluster:
    """An API server that has the chart's objects, three nodes and a pod of the installer on each."""

    def __init__(self, directory):
        self.processes = []
        self.certificate = directory / "certificates/apiserver.crt"
        self.port, etcd, peer = free_port(), free_port(), free_port()
        (directory / "tokens").write_text("of-admin,admin,admin,system:masters\n")
        key = directory / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        etcd = f"http://127.0.0.1:{etcd}"
        self.start(directory, os.environ["ETCD"], "--data-dir", directory / "etcd", "--unsafe-no-fsync", "--log-level", "warn",
                   "--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", f"http://127.0.0.1:{peer}")
        self.start(directory, os.environ["APISERVER"], f"--etcd-servers={etcd}", f"--secure-port={self.port}", "--bind-address=127.0.0.1",
                   "--advertise-address=192.0.2.1", f"--cert-dir={self.certificate.parent}", f"--token-auth-file={directory / 'tokens'}",
                   "--authorization-mode=RBAC", "--anonymous-auth=false", "--service-account-issuer=https://cluster.invalid",
                   f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}", "--allow-privileged=true",
                   "--service-cluster-ip-range=198.51.100.0/24", "--endpoint-reconciler-type=none")
        self.admin = self.client("of-admin")
        self.wait_for("the API server", 300, self.is_ready)
        self.fill()

    def start(self, directory, program, *arguments):
        log = directory / f"{Path(program).name}.log"
        with log.open("w") as file:
            process = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.processes.append((process, log))

    def end(self):
        for process, _ in reversed(self.processes):
            process.kill()
            process.wait()

    def wait_for(self, what, seconds, check):
        until = time.monotonic() + seconds
        while not check():
            for process, log in self.processes:
                if process.poll() is not None or time.monotonic() > until:
                    raise AssertionError(f"{what}: not there; the end of {log.name}:\n" + log.read_text()[-2000:])
            time.sleep(0.2)

    def client(self, token):
        return Client(self.port, token)

    def is_ready(self):
        try:
            return self.admin.ask("GET", "/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            self.admin.connection.close()
            return False

    def make(self, document):
        # An unknown field is an error.
        return self.admin.do("POST", path_of(document, name=False) + "?fieldValidation=Strict", document)

    def fill(self):
        self.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        self.documents = test_chart.template(test_chart.IMAGE)
        for document in self.documents:
            self.make(document)
        self.daemon_set = test_chart.only(self.documents, "DaemonSet")
        self.nodes = [self.make(node(name)) for name in ("plain", "other", "rich")]
        self.of_nodes = {name: self.client(self.token(INSTALLER, self.installer(name))) for name in ("plain", "other", "rich")}
        self.remover = self.client(self.token(REMOVER))
        self.make({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody", "namespace": NAMESPACE}})
        self.nobody = self.client(self.token("nobody"))
        # The server takes policies up some time after they were made.
        other = ("PATCH", "/api/v1/nodes/other?dryRun=All", {"metadata": {"labels": {LABEL: "ready"}}}, MERGE)
        self.wait_for("the installer's policy", 120, lambda: self.of_nodes["plain"].ask(*other)[0] != 200)
        image = ("PATCH", path_of(self.daemon_set) + "?dryRun=All",
                 {"spec": {"template": {"spec": {"containers": [{"name": "installer", "image": "evil"}]}}}}, STRATEGIC)
        self.wait_for("the remover's policy", 120, lambda: self.remover.ask(*image)[0] != 200)

    def installer(self, on):
        """Makes the pod that the DaemonSet's controller would make on a node."""
        template = self.daemon_set["spec"]["template"]
        meta = {**template["metadata"], "name": f"installer-{on}", "namespace": NAMESPACE}
        return self.make({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {**template["spec"], "nodeName": on}})

    def token(self, account, pod=None):
        """Returns a token as kubelet gets it for a pod, or one of no pod."""
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        if pod:
            asked["spec"]["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        return self.admin.do("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token", asked)["status"]["token"]


def node(name):
    """Returns a node; a rich one has something of all that a node may have."""
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    if name == "rich":
        made["metadata"] |= {"labels": {"zone": "a", "node-role.kubernetes.io/control-plane": ""}, "annotations": {"of": "cloud"},
                             "finalizers": ["cloud.example/machine"],
                             "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "plain", "uid": "00000000-0000-0000-0000-000000000001"}]}
        made["spec"] = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}], "unschedulable": True,
                        "providerID": "cloud://1"}
    return made


def setUpModule():
    global cluster
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    cluster = Cluster.__new__(Cluster)
    unittest.addModuleCleanup(lambda: cluster.end())
    cluster.__init__(Path(directory.name))


@contextlib.contextmanager
def widened(role, rules):
    """Adds rules to a role or cluster role of the chart for a time."""
    (document,) = [d for d in cluster.documents if (d["kind"], d["metadata"]["name"]) == role]
    cluster.admin.do("PATCH", path_of(document), {"rules": [*document["rules"], *rules]}, MERGE)
    try:
        yield
    finally:
        cluster.admin.do("PATCH", path_of(document), {"rules": document["rules"]}, MERGE)


ROLE_OF_INSTALLER = ("ClusterRole", f"{INSTALLER}-{NAMESPACE}")
ROLE_OF_REMOVER = ("Role", REMOVER)


def told(client, namespace):
    """Returns all rights in a namespace as the server lists them: resources, by group, name and verb, and paths."""
    asked = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    status = client.do("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", asked)["status"]
    assert not status["incomplete"], status
    resources = {(group, resource + (f" {name}" if name else ""), verb) for rule in status["resourceRules"] for group in rule["apiGroups"]
                 for resource in rule["resources"] for name in rule.get("resourceNames") or [""] for verb in rule["verbs"]}
    paths = {(verb, path) for rule in status["nonResourceRules"] for verb in rule["verbs"] for path in rule["nonResourceURLs"]}
    return resources, paths


def may(client, **attributes):
    kind = "nonResourceAttributes" if "path" in attributes else "resourceAttributes"
    asked = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {kind: attributes}}
    return client.do("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", asked)["status"]["allowed"]


def served():
    """Returns every resource and subresource of the server: its group, name and whether it is in namespaces."""
    found = {("", resource, False) for resource in ("users", "groups", "uids")} | {("authentication.k8s.io", "userextras", False)}
    paths = ["/api/v1"]
    paths += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in cluster.admin.do("GET", "/apis")["groups"]]
    for path in paths:
        group = "" if path == "/api/v1" else path.split("/")[2]
        found |= {(group, resource["name"], resource["namespaced"]) for resource in cluster.admin.do("GET", path)["resources"]}
    return sorted(found)


class Roles(unittest.TestCase):
    """Exactly what RBAC allows."""

    def test_the_server_lists_these_rights_and_no_others(self):
        of_remover = {("apps", f"daemonsets {INSTALLER}", verb) for verb in ("get", "patch")}
        expected = [(cluster.nobody, set(), set()), (cluster.of_nodes["plain"], {("", "nodes", "patch")}, {("", "nodes", "patch")}),
                    (cluster.remover, of_remover, set())]
        for number, (client, at_home, elsewhere) in enumerate(expected):
            for namespace in (NAMESPACE, "kube-system", "default"):
                with self.subTest(number, namespace=namespace):
                    resources, paths = told(client, namespace)
                    self.assertEqual(resources - EVERYONES, at_home if namespace == NAMESPACE else elsewhere)
                    self.assertEqual(paths, {("get", path) for path in EVERYONES_PATHS})

    def test_asked_for_each_verb_on_each_resource_it_allows_the_same(self):
        resources = served()
        for known in ("secrets", "pods/exec", "serviceaccounts/token", "nodes/proxy", "certificatesigningrequests/approval", "clusterrolebindings"):
            self.assertIn(known, {name for _, name, _ in resources})
        for client, expected in ((cluster.of_nodes["plain"], {("", "nodes", "patch", "")}), (cluster.remover, set())):
            found = set()
            for group, resource, in_namespaces in resources:
                name, _, sub = resource.partition("/")
                for namespace in ((NAMESPACE, "kube-system") if in_namespaces else ("",)):
                    for verb in VERBS:
                        asked = {"group": group, "resource": name, "subresource": sub, "verb": verb, "namespace": namespace}
                        if (group, resource, verb) not in EVERYONES and may(client, **asked):
                            found.add((group, resource, verb, namespace))
            self.assertEqual(found, expected)

    def test_named_objects_and_everything_at_once(self):
        for client, name in ((cluster.of_nodes["plain"], "installer"), (cluster.remover, "remover")):
            with self.subTest(name):
                self.assertFalse(may(client, group="*", resource="*", verb="*"))
                self.assertFalse(may(client, group="*", resource="*", verb="*", namespace=NAMESPACE))
                for path in ("/metrics", "/logs/", "/debug/pprof/", "/configz", "/*"):
                    self.assertFalse(may(client, path=path, verb="get"), path)
                found = {verb for verb in VERBS
                         if may(client, group="apps", resource="daemonsets", name=INSTALLER, namespace=NAMESPACE, verb=verb)}
                self.assertEqual(found, {"get", "patch"} if name == "remover" else set())
                others = [(INSTALLER, "kube-system"), ("kube-proxy", NAMESPACE)]
                self.assertFalse(any(may(client, group="apps", resource="daemonsets", name=name, namespace=namespace, verb=verb)
                                     for name, namespace in others for verb in VERBS))

    def test_a_role_that_is_widened_shows(self):
        def seen(right):
            return lambda: right in told(cluster.of_nodes["plain"], NAMESPACE)[0]

        more = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}]
        with widened(ROLE_OF_INSTALLER, more):
            cluster.wait_for("the right", 60, seen(("", "secrets", "list")))
            self.assertTrue(may(cluster.of_nodes["plain"], resource="secrets", verb="list", namespace="kube-system"))
        cluster.wait_for("the right's end", 60, lambda: not seen(("", "secrets", "list"))())


class Policies(unittest.TestCase):
    """Base: what passes is undone, and what is refused has changed nothing."""

    def passes(self, client, *request):
        status, answer = client.ask(*request)
        self.assertEqual(status, 200, (request, answer))
        return answer

    def refused(self, path, text, client, *request):
        """Checks that a policy refuses a request by this text, not RBAC, and that the object stays as it was."""
        before = cluster.admin.do("GET", path)
        status, answer = client.ask(*request)
        self.assertIn(status, (403, 422), (request, answer))
        self.assertIn("ValidatingAdmissionPolicy", answer["message"], request)
        self.assertIn(text, answer["message"], request)
        self.assertEqual(cluster.admin.do("GET", path), before)


class Installers(Policies):
    """A node's token changes this node's label, and nothing else."""

    ALONE, LABELS, NODE = "changes its own node alone", f"changes the label {LABEL} alone", "changes nothing of a node but a label"

    def label(self, client, name, value):
        return client.ask("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": {LABEL: value}}}, MERGE)

    def test_it_sets_and_removes_the_label_of_its_node(self):
        for name in ("plain", "rich"):
            before = cluster.admin.do("GET", f"/api/v1/nodes/{name}")["metadata"].get("labels", {})
            for value, after in (("ready", before | {LABEL: "ready"}), ("ready", before | {LABEL: "ready"}), ("else", before | {LABEL: "else"}),
                                 (None, before), (None, before)):
                with self.subTest(name, value=value):
                    status, answer = self.label(cluster.of_nodes[name], name, value)
                    self.assertEqual((status, answer["metadata"].get("labels", {})), (200, after), answer)
        own = {"metadata": {"labels": {LABEL: "ready"}}}
        for kind, body in ((STRATEGIC, own), (JSON_PATCH, [{"op": "add", "path": "/metadata/labels/io.sandboxer~1node", "value": "ready"}]),
                           (APPLY, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "rich", **own["metadata"]}})):
            with self.subTest(kind):
                self.passes(cluster.of_nodes["rich"], "PATCH", f"/api/v1/nodes/rich?fieldManager=installer{'&force=true' if kind == APPLY else ''}", body, kind)
        self.assertEqual(self.label(cluster.of_nodes["rich"], "rich", None)[0], 200)

    def test_another_node_is_refused_and_so_is_a_token_of_no_node(self):
        body = {"metadata": {"labels": {LABEL: "ready"}}}
        unbound = cluster.client(cluster.token(INSTALLER))
        for client, name in ((cluster.of_nodes["plain"], "other"), (cluster.of_nodes["other"], "plain"), (cluster.of_nodes["plain"], "rich"),
                             (unbound, "plain")):
            for kind in (MERGE, STRATEGIC):
                self.refused(f"/api/v1/nodes/{name}", self.ALONE, client, "PATCH", f"/api/v1/nodes/{name}", body, kind)

    def test_another_label_is_refused(self):
        for labels in ({"zone": "b"}, {"zone": None}, {"zone": ""}, {"new": "1"}, {LABEL: "ready", "new": "1"}, {LABEL + "s": "ready"},
                       {"kubernetes.io/hostname": "plain"}, {"node-role.kubernetes.io/control-plane": None}, {"node-role.kubernetes.io/etcd": ""}):
            with self.subTest(labels):
                self.refused("/api/v1/nodes/rich", self.LABELS, cluster.of_nodes["rich"], "PATCH", "/api/v1/nodes/rich",
                             {"metadata": {"labels": labels}}, MERGE)
        for operations in ([{"op": "remove", "path": "/metadata/labels"}],
                           [{"op": "replace", "path": "/metadata/labels", "value": {LABEL: "ready"}}]):
            self.refused("/api/v1/nodes/rich", self.LABELS, cluster.of_nodes["rich"], "PATCH", "/api/v1/nodes/rich", operations, JSON_PATCH)
        self.refused("/api/v1/nodes/plain", self.LABELS, cluster.of_nodes["plain"], "PATCH", "/api/v1/nodes/plain",
                     {"metadata": {"labels": {"new": "1"}}}, MERGE)

    def test_the_rest_of_its_node_is_refused(self):
        owner = {"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "00000000-0000-0000-0000-000000000002"}
        for body in ({"spec": {"taints": None}}, {"spec": {"taints": [{"key": "new", "effect": "NoExecute"}]}}, {"spec": {"unschedulable": None}},
                     {"spec": {"unschedulable": None, "taints": None}, "metadata": {"labels": {LABEL: "ready"}}},
                     {"metadata": {"annotations": {"new": "1"}}}, {"metadata": {"annotations": {"of": "me"}}}, {"metadata": {"annotations": None}},
                     {"metadata": {"finalizers": None}}, {"metadata": {"finalizers": ["cloud.example/machine", "mine.example/x"]}},
                     # Of the same number: the collector of garbage deletes a node whose owner does not exist.
                     {"metadata": {"ownerReferences": [owner]}}, {"metadata": {"ownerReferences": None}}):
            with self.subTest(body):
                self.refused("/api/v1/nodes/rich", self.NODE, cluster.of_nodes["rich"], "PATCH", "/api/v1/nodes/rich", body, MERGE)
        for body in ({"spec": {"taints": None}}, {"spec": {"unschedulable": True}}, {"metadata": {"annotations": {"new": "1"}}},
                     {"metadata": {"finalizers": ["mine.example/x"]}}, {"metadata": {"ownerReferences": [owner]}}):
            with self.subTest(plain=body):
                self.refused("/api/v1/nodes/plain", self.NODE, cluster.of_nodes["plain"], "PATCH", "/api/v1/nodes/plain", body, MERGE)

    def test_whatever_role_it_has_it_makes_deletes_and_enters_no_node(self):
        every = [{"apiGroups": [""], "resources": ["nodes", "nodes/status", "nodes/proxy"], "verbs": ["*"]}]
        client = cluster.of_nodes["plain"]
        condition = {"type": "Ready", "status": "True", "reason": "x", "message": "y"}
        with widened(ROLE_OF_INSTALLER, every):
            cluster.wait_for("the right", 60, lambda: may(client, resource="nodes", subresource="proxy", verb="get"))
            for request in (("POST", "/api/v1/nodes", node("new")), ("DELETE", "/api/v1/nodes/plain"), ("DELETE", "/api/v1/nodes/other"),
                            ("DELETE", "/api/v1/nodes"), ("GET", "/api/v1/nodes/plain/proxy/pods"), ("GET", "/api/v1/nodes/other/proxy/pods"),
                            ("POST", "/api/v1/nodes/other/proxy/run/a/b/c"),
                            ("PATCH", "/api/v1/nodes/plain/status", {"status": {"conditions": [condition]}}, STRATEGIC),
                            ("PATCH", "/api/v1/nodes/plain/status", {"metadata": {"labels": {LABEL: "ready"}}}, MERGE),
                            ("PATCH", "/api/v1/nodes/new?fieldManager=x", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "new"}}, APPLY)):
                with self.subTest(request):
                    self.refused("/api/v1/nodes/plain", "", client, *request)
            self.assertEqual(len(cluster.admin.do("GET", "/api/v1/nodes")["items"]), 3)
            whole = cluster.admin.do("GET", "/api/v1/nodes/rich")
            whole["spec"]["unschedulable"] = False
            self.refused("/api/v1/nodes/rich", self.NODE, cluster.of_nodes["rich"], "PUT", "/api/v1/nodes/rich", whole)
        cluster.wait_for("the right's end", 60, lambda: not may(client, resource="nodes", subresource="proxy", verb="get"))

    def test_others_are_not_held_to_it(self):
        for value in ("x", None):
            self.passes(cluster.admin, "PATCH", "/api/v1/nodes/other", {"metadata": {"labels": {"new": value}, "annotations": {"new": value}}}, MERGE)


class Removers(Policies):
    """The remover's token turns the installers into removers, and nothing else."""

    TEXT = "changes the mode of the installers alone"

    def setUp(self):
        self.path = path_of(cluster.daemon_set)

    def test_the_installers_own_request_passes_and_it_waits_for_the_nodes(self):
        before = cluster.admin.do("GET", self.path)
        with tempfile.TemporaryDirectory() as account:
            Path(account, "token").write_text(cluster.remover.token)
            shutil.copy(cluster.certificate, Path(account, "ca.crt"))
            env = {"ACCOUNT": account, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(cluster.port)}
            command = ["dash", test_chart.ROOT / "deploy/installer/installer", "remove-everywhere", NAMESPACE, INSTALLER]
            remover = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
            try:
                def is_told():
                    assert remover.poll() is None, remover.stderr.read()
                    template = cluster.admin.do("GET", self.path)["spec"]["template"]
                    return template["metadata"]["annotations"]["io.sandboxer/mode"] == "remove"

                cluster.wait_for("the changed mode", 60, is_told)
                # A double of the controller.
                status = {"observedGeneration": before["metadata"]["generation"] + 1, "desiredNumberScheduled": 3, "updatedNumberScheduled": 3,
                          "numberReady": 3, "currentNumberScheduled": 3, "numberMisscheduled": 0}
                cluster.admin.do("PATCH", self.path + "/status", {"status": status}, MERGE)
                _, said = remover.communicate(timeout=60)
            finally:
                remover.kill()
                remover.wait()
        self.assertEqual((remover.returncode, "removed from 3 nodes" in said), (0, True), said)
        after = cluster.admin.do("GET", self.path)
        self.assertEqual(after["spec"]["template"]["spec"], before["spec"]["template"]["spec"])
        body = {"spec": {"template": before["spec"]["template"], "updateStrategy": before["spec"]["updateStrategy"]}}
        cluster.admin.do("PATCH", self.path, body, MERGE)

    def test_anything_else_of_them_is_refused(self):
        container = {"name": "installer"}
        of_pod = [{"containers": [{**container, "image": "evil"}]}, {"containers": [{**container, "command": ["/bin/sh"]}]},
                  {"containers": [{**container, "env": [{"name": "PREFIX", "value": "/evil"}]}]}, {"containers": [{"name": "more", "image": "evil"}]},
                  {"initContainers": [{"name": "first", "image": "evil"}]}, {"serviceAccountName": "default"}, {"hostIPC": True},
                  {"volumes": [{"name": "more", "hostPath": {"path": "/etc"}}]}, {"nodeSelector": {"kubernetes.io/hostname": "plain"}},
                  {"tolerations": [{"operator": "Exists"}]}]
        bodies = [{"spec": {"template": {"spec": spec}}} for spec in of_pod]
        mode = {"io.sandboxer/mode": "remove"}
        bodies.append({"spec": {"template": {"metadata": {"annotations": mode}, "spec": of_pod[0]}}})
        owner = {"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "00000000-0000-0000-0000-000000000002"}
        bodies += [{"spec": {"template": {"metadata": meta}}} for meta in (
            {"annotations": {"inject.example/sidecar": "true"}}, {"annotations": {"io.sandboxer/config": None}}, {"annotations": {"io.sandboxer/mode": "else"}},
            {"annotations": {"io.sandboxer/mode": None}}, {"labels": {"more": "1"}})]
        bodies += [{"metadata": meta} for meta in ({"ownerReferences": [owner]}, {"finalizers": ["mine.example/x"]}, {"labels": {"more": "1"}})]
        for body in bodies:
            with self.subTest(body):
                self.refused(self.path, self.TEXT, cluster.remover, "PATCH", self.path, body, STRATEGIC)

    def test_whatever_role_it_has_it_makes_and_deletes_none(self):
        every = [{"apiGroups": ["apps"], "resources": ["daemonsets", "daemonsets/status"], "verbs": ["*"]}]
        new = copy.deepcopy(cluster.daemon_set)
        new["metadata"]["name"] = "new"
        with widened(ROLE_OF_REMOVER, every):
            cluster.wait_for("the right", 60, lambda: may(cluster.remover, group="apps", resource="daemonsets", verb="delete", namespace=NAMESPACE))
            for request in (("POST", path_of(new, name=False), new), ("DELETE", self.path), ("DELETE", path_of(new, name=False)),
                            ("PATCH", f"{self.path}/status", {"status": {"numberReady": 1}}, MERGE)):
                with self.subTest(request[:2]):
                    self.refused(self.path, "", cluster.remover, *request)
        cluster.wait_for("the right's end", 60,
                         lambda: not may(cluster.remover, group="apps", resource="daemonsets", verb="delete", namespace=NAMESPACE))


if __name__ == "__main__":
    unittest.main(verbosity=2)
