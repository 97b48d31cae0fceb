"""Renders the chart with helm and checks what comes out. Run by `make test-chart`, which sets HELM, PROMTOOL and SANDBOXER."""

import json
import os
import re
import subprocess
import tempfile
import tomllib
import unittest
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/sandboxer"
HELM = os.environ["HELM"]
PROMTOOL = os.environ["PROMTOOL"]
SANDBOXER = os.environ["SANDBOXER"]
IMAGE = {"installer": {"image": "registry.example/sandboxer-installer:1"}}


def helm(*arguments, values=None, kubernetes="1.30.0"):
    """Runs helm with these values; returns its status, output and errors."""
    with tempfile.TemporaryDirectory() as home, tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values or {}, file)
        file.flush()
        env = {"PATH": os.environ["PATH"], "HOME": home}
        # Helm as a module has no current version of Kubernetes in it.
        command = [HELM, *arguments, "--kube-version", kubernetes, "--values", file.name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def template(values=None, name="sbx"):
    status, out, errors = helm("template", name, str(CHART), "--namespace", "sandboxer", values=values)
    if status:
        raise AssertionError(errors)
    return [document for document in yaml.safe_load_all(out) if document]


def merged(*values):
    """Returns the deep union of these values."""
    result = {}
    for value in values:
        for key, inner in value.items():
            result[key] = merged(result.get(key, {}), inner) if isinstance(inner, dict) else inner
    return result


def only(documents, kind):
    found = [document for document in documents if document["kind"] == kind]
    assert len(found) == 1, f"{len(found)} of {kind}"
    return found[0]


ALL_METRICS = {
    "metrics": {
        "enabled": True,
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "slowStageSeconds": 2.5},
        "dashboard": {"enabled": True, "annotations": {"folder": "nodes"}},
    }
}
TWO_CLASSES = {
    "runtimeClasses": {
        "sandboxer": {"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "vm", "operator": "Exists"}]},
        "sandboxer-fc": {"overhead": {"memory": "12Mi", "cpu": "5m"}, "vmm": "firecracker", "startPath": "template"},
    }
}


class Renders(unittest.TestCase):
    def test_lint(self):
        for values in (IMAGE, merged(IMAGE, ALL_METRICS, TWO_CLASSES), {"installer": {"enabled": False}}):
            status, out, errors = helm("lint", "--strict", str(CHART), values=values)
            self.assertEqual(status, 0, out + errors)

    def test_the_default_makes_an_installer_and_a_runtime_class(self):
        documents = template(IMAGE)
        kinds = sorted(document["kind"] for document in documents)
        policies = ["ValidatingAdmissionPolicy"] * 2 + ["ValidatingAdmissionPolicyBinding"] * 2
        expected = ["ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet", "Job", "Role", "RoleBinding", "RuntimeClass", "ServiceAccount",
                    "ServiceAccount", *policies]
        self.assertEqual(kinds, expected)
        runtime_class = only(documents, "RuntimeClass")
        self.assertEqual(runtime_class["handler"], "sandboxer")
        self.assertEqual(runtime_class["overhead"], {"podFixed": {"memory": "25Mi"}})
        self.assertEqual(runtime_class["scheduling"]["nodeSelector"], {"io.sandboxer/node": "ready"})
        pod = only(documents, "DaemonSet")["spec"]["template"]["spec"]
        env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        self.assertEqual(env["PROGRAMS"], "mkfs.erofs mkfs.ext4 qemu-system-x86_64-microvm|qemu-system-x86_64|cloud-hypervisor")
        self.assertEqual(pod["containers"][0]["image"], IMAGE["installer"]["image"])

    def test_every_name_is_valid_whatever_the_release_is_called(self):
        for name in ("sbx", "a" * 53):
            for document in template(merged(IMAGE, ALL_METRICS), name):
                self.assertRegex(document["metadata"]["name"], r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
                if document["kind"] in ("Job", "Service"):
                    self.assertLessEqual(len(document["metadata"]["name"]), 63)

    def test_a_class_for_each_handler(self):
        classes = {d["metadata"]["name"]: d for d in template(merged(IMAGE, TWO_CLASSES)) if d["kind"] == "RuntimeClass"}
        self.assertEqual(sorted(classes), ["sandboxer", "sandboxer-fc"])
        selector = classes["sandboxer"]["scheduling"]["nodeSelector"]
        self.assertEqual(selector, {"disk": "fast", "io.sandboxer/node": "ready"})
        self.assertEqual(classes["sandboxer"]["scheduling"]["tolerations"], [{"key": "vm", "operator": "Exists"}])
        self.assertEqual(classes["sandboxer-fc"]["overhead"]["podFixed"], {"memory": "12Mi", "cpu": "5m"})

    def test_without_the_installer_no_image_is_needed(self):
        documents = template({"installer": {"enabled": False}})
        self.assertEqual([document["kind"] for document in documents], ["RuntimeClass"])
        self.assertNotIn("scheduling", documents[0])

    def test_metrics_are_off_by_default_and_complete_when_on(self):
        documents = template(merged(IMAGE, ALL_METRICS))
        monitor = only(documents, "ServiceMonitor")
        service = only(documents, "Service")
        daemon_set = only(documents, "DaemonSet")
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        self.assertLessEqual(wanted, service["metadata"]["labels"].items())
        pods = daemon_set["spec"]["template"]["metadata"]["labels"].items()
        self.assertLessEqual(service["spec"]["selector"].items(), pods)
        self.assertEqual(service["spec"]["ports"][0]["name"], monitor["spec"]["endpoints"][0]["port"])
        self.assertEqual(monitor["metadata"]["labels"]["release"], "prometheus")
        dashboard = next(d for d in documents if d["metadata"]["name"].endswith("-dashboard"))
        self.assertEqual(dashboard["metadata"]["labels"]["grafana_dashboard"], "1")
        self.assertEqual(dashboard["metadata"]["annotations"], {"folder": "nodes"})
        self.assertEqual(json.loads(dashboard["data"]["sandboxer.json"])["title"], "sandboxer")

    def test_the_removal_waits_for_the_installers(self):
        documents = template(IMAGE)
        job, daemon_set, role = only(documents, "Job"), only(documents, "DaemonSet"), only(documents, "Role")
        self.assertEqual(job["metadata"]["annotations"]["helm.sh/hook"], "pre-delete")
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        self.assertEqual(command[1:], ["remove-everywhere", "sandboxer", daemon_set["metadata"]["name"]])
        self.assertEqual(role["rules"][0]["resourceNames"], [daemon_set["metadata"]["name"]])

    def test_a_changed_configuration_is_installed(self):
        def mark(values):
            return only(template(values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]["io.sandboxer/config"]

        first = mark(IMAGE)
        self.assertEqual(first, mark(IMAGE))
        self.assertNotEqual(first, mark(merged(IMAGE, {"installer": {"config": {"pool": {"max": 8}}}})))
        self.assertNotEqual(first, mark(merged(IMAGE, TWO_CLASSES)))


class Refuses(unittest.TestCase):
    def refused(self, values, *texts):
        status, _, errors = helm("template", "sbx", str(CHART), values=values)
        self.assertNotEqual(status, 0, f"{values} is accepted")
        for text in texts:
            self.assertIn(text, errors)

    def test_an_unknown_value_by_name(self):
        for path in ("", "installer", "installer.containerd", "installer.config", "installer.config.vm", "metrics",
                     "metrics.serviceMonitor", "metrics.rules", "metrics.dashboard", "runtimeClasses.sandboxer",
                     "runtimeClasses.sandboxer.overhead"):
            with self.subTest(path):
                values = {"imagine": True}
                for key in reversed([key for key in path.split(".") if key]):
                    values = {key: values}
                self.refused(merged(IMAGE, values), "imagine")

    def test_a_bad_value_by_name(self):
        for values, text in (
            ({"runtimeClasses": {"sandboxer": {"overhead": {"memory": "25 MB"}}}}, "memory"),
            ({"runtimeClasses": {"sandboxer": {"vmm": "bochs"}}}, "vmm"),
            ({"runtimeClasses": {"Sand_boxer": {}}}, "Sand_boxer"),
            ({"installer": {"prefix": "opt/sandboxer"}}, "prefix"),
            ({"installer": {"containerd": {"service": "a b"}}}, "service"),
            ({"installer": {"config": {"vm": {"vmm": "bochs"}}}}, "vmm"),
            ({"installer": {"config": {"pool": {"max": "8"}}}}, "max"),
            ({"metrics": {"port": 0}}, "port"),
        ):
            with self.subTest(values=values):
                self.refused(merged(IMAGE, values), text)

    def test_a_missing_image(self):
        self.refused({}, "installer.image is not set")

    def test_a_service_monitor_without_metrics(self):
        self.refused(merged(IMAGE, {"metrics": {"serviceMonitor": {"enabled": True}}}), "needs metrics.enabled")
        values = merged(ALL_METRICS, {"installer": {"enabled": False}})
        self.refused(values, "needs installer.enabled")


def files_of(values):
    documents = template(values)
    name = only(documents, "DaemonSet")["metadata"]["name"]
    return next(d for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"] == name)["data"]


class Files(unittest.TestCase):
    """What the chart puts on a node."""

    def test_the_drop_in_is_that_of_the_package_but_for_the_program(self):
        ours = tomllib.loads(files_of(IMAGE)["containerd.toml"])
        package = tomllib.loads((ROOT / "vmm-configs/containerd/sandboxer.toml").read_text())
        runtimes = ours["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
        program = runtimes["sandboxer"].pop("runtime_path")
        self.assertEqual(program, "/opt/sandboxer/bin/containerd-shim-sandboxer-v1")
        self.assertEqual(ours, package)

    def test_the_daemon_accepts_every_configuration(self):
        config = {"concurrent_starts": 4, "vm": {"vmm": "qemu", "default_memory_mib": 1048576, "jail": True},
                  "pool": {"min": 1, "max": 8}, "volumes": {"timeout": 7}, "placement": {"reserved_cpus": "0-1"},
                  "traces": {"endpoint": "http://127.0.0.1:4317", "sampling_ratio": 0.25}}
        for values in (IMAGE, merged(IMAGE, TWO_CLASSES, ALL_METRICS), merged(IMAGE, {"installer": {"config": config}})):
            text = files_of(values)["config.toml"]
            with self.subTest(text), tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(text)
                file.flush()
                checked = subprocess.run([SANDBOXER, "--config", file.name, "--check-config"], capture_output=True, text=True)
                self.assertEqual(checked.returncode, 0, checked.stderr)
        self.assertEqual(tomllib.loads(text)["pool"], {"min": 1, "max": 8})
        self.assertEqual(tomllib.loads(text)["traces"]["sampling_ratio"], 0.25)
        self.assertEqual(tomllib.loads(text)["vm"]["kernel"], "/opt/sandboxer/lib/vmlinux")
        both = tomllib.loads(files_of(merged(IMAGE, TWO_CLASSES, ALL_METRICS))["config.toml"])
        self.assertEqual(both["handlers"], {"sandboxer-fc": {"vmm": "firecracker", "start_path": "template"}})
        self.assertEqual(both["metrics_listen"], "0.0.0.0:9464")

    def test_the_schema_has_every_key_of_the_daemons_configuration(self):
        schema = json.loads((CHART / "values.schema.json").read_text())
        schema = schema["properties"]["installer"]["properties"]["config"]["properties"]
        ours = {(key,) for key, value in schema.items() if "properties" not in value}
        ours |= {(table, key) for table, value in schema.items() for key in value.get("properties", {})}
        theirs, table = set(), ()
        for line in (ROOT / "vmm-configs/sandboxer.toml").read_text().splitlines():
            if found := re.fullmatch(r"\[(\w+)\]", line):
                table = (found[1],)
            elif found := re.match(r"(?:# )?(\w+) = ", line):
                theirs.add((*table, found[1]))
        fixed = {("run_dir",), ("state_dir",), ("metrics_listen",), ("vm", "kernel"), ("vm", "initramfs")}
        self.assertEqual(ours, {key for key in theirs - fixed if key[0] != "handlers"})


class Rights(unittest.TestCase):
    """Who may do what in the cluster, from the files that are rendered: a token on a node is everybody's who is root there."""

    def setUp(self):
        self.documents = template(IMAGE)

    def of(self, kind, name):
        (found,) = [d for d in self.documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
        return found

    def rights(self, account):
        """Returns what an account may do: namespace (or the cluster), API group, resource, name (or all), verb."""
        found = set()
        for binding in (d for d in self.documents if d["kind"] in ("RoleBinding", "ClusterRoleBinding")):
            subjects = [(s["kind"], s["namespace"], s["name"]) for s in binding["subjects"]]
            self.assertTrue(all(kind == "ServiceAccount" for kind, *_ in subjects), subjects)
            if ("ServiceAccount", "sandboxer", account) not in subjects:
                continue
            role = self.of(binding["roleRef"]["kind"], binding["roleRef"]["name"])
            where = binding["metadata"].get("namespace", "the cluster")
            for rule in role["rules"]:
                self.assertEqual(set(rule) - {"resourceNames"}, {"apiGroups", "resources", "verbs"})
                found |= {(where, group, resource, name, verb) for group in rule["apiGroups"] for resource in rule["resources"]
                          for name in rule.get("resourceNames", ["all"]) for verb in rule["verbs"]}
        return found

    def account(self, kind):
        pod = only(self.documents, kind)["spec"]["template"]["spec"]
        self.assertTrue(pod["automountServiceAccountToken"])
        return pod["serviceAccountName"]

    def policy(self, account):
        """Returns the policy for an account, which has to be bound."""
        condition = f"request.userInfo.username == 'system:serviceaccount:sandboxer:{account}'"
        (policy,) = [d for d in self.documents if d["kind"] == "ValidatingAdmissionPolicy"
                     and [c["expression"] for c in d["spec"]["matchConditions"]] == [condition]]
        (binding,) = [d for d in self.documents if d["kind"] == "ValidatingAdmissionPolicyBinding"
                      and d["spec"]["policyName"] == policy["metadata"]["name"]]
        self.assertEqual(binding["spec"], {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]})
        self.assertEqual(policy["spec"]["failurePolicy"], "Fail")
        (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
        self.assertEqual(rule["operations"], ["*"])
        return rule["resources"], " ".join(v["expression"] for v in policy["spec"]["validations"])

    def test_no_token_on_a_node_changes_what_runs_on_others(self):
        installer = self.account("DaemonSet")
        self.assertEqual(self.rights(installer), {("the cluster", "", "nodes", "all", "patch")})
        resources, rules = self.policy(installer)
        self.assertEqual(resources, ["nodes", "nodes/*"])
        for part in ("request.operation == 'UPDATE'", "variables.of[0] == request.name", "'io.sandboxer/node'", "object.spec == oldObject.spec"):
            self.assertIn(part, rules)

    def test_the_removers_rights_exist_only_while_the_chart_is_deleted(self):
        remover, daemon_set = self.account("Job"), only(self.documents, "DaemonSet")["metadata"]["name"]
        self.assertNotEqual(remover, self.account("DaemonSet"))
        self.assertEqual(self.rights(remover), {("sandboxer", "apps", "daemonsets", daemon_set, verb) for verb in ("get", "patch")})
        weights = {}
        for kind in ("ServiceAccount", "Role", "RoleBinding", "Job"):
            notes = self.of(kind, remover)["metadata"]["annotations"]
            self.assertEqual((notes["helm.sh/hook"], notes["helm.sh/hook-delete-policy"]), ("pre-delete", "before-hook-creation,hook-succeeded"))
            weights[kind] = int(notes["helm.sh/hook-weight"])
        self.assertTrue(all(weights["Job"] > weight for kind, weight in weights.items() if kind != "Job"), weights)
        resources, rules = self.policy(remover)
        self.assertEqual(resources, ["daemonsets", "daemonsets/*"])
        self.assertIn("object.spec.template.spec == oldObject.spec.template.spec", rules)

    def test_no_account_but_those_has_rights_and_none_gives_its_token_unasked(self):
        accounts = {d["metadata"]["name"]: d for d in self.documents if d["kind"] == "ServiceAccount"}
        self.assertEqual(set(accounts), {self.account("DaemonSet"), self.account("Job")})
        for account in accounts.values():
            self.assertIs(account["automountServiceAccountToken"], False)
        bound = {s["name"] for d in self.documents for s in d.get("subjects", [])}
        self.assertEqual(bound, set(accounts))
        self.assertFalse(any("rules" in d and d["kind"] not in ("Role", "ClusterRole", "PrometheusRule") for d in self.documents))

    def test_a_cluster_without_such_policies_is_refused(self):
        command = ["template", "sbx", str(CHART), "--namespace", "sandboxer"]
        status, _, errors = helm(*command, values=IMAGE, kubernetes="1.29.3")
        self.assertNotEqual(status, 0)
        self.assertIn("the installer needs Kubernetes 1.30", errors)
        status, _, errors = helm(*command, values={"installer": {"enabled": False}}, kubernetes="1.29.3")
        self.assertEqual(status, 0, errors)


class Alerts(unittest.TestCase):
    def test_promtool_accepts_the_alerts_and_they_fire(self):
        rules = only(template(merged(IMAGE, ALL_METRICS)), "PrometheusRule")["spec"]
        self.assertIn("> 2.5", json.dumps(rules))
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "alerts.yaml").write_text(yaml.safe_dump(rules))
            (Path(directory) / "cases.yaml").write_text((ROOT / "deploy/tests/alerts.yaml").read_text())
            for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "cases.yaml"]):
                done = subprocess.run([PROMTOOL, *command], cwd=directory, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        tested = yaml.safe_load((ROOT / "deploy/tests/alerts.yaml").read_text())["tests"]
        fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case["exp_alerts"]}
        every = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
        self.assertEqual(fired, every, "an alert without a case in which it fires")

    def test_promtool_accepts_every_query_of_the_dashboard(self):
        dashboard = json.loads((CHART / "files/dashboard.json").read_text())
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        rules = [{"record": f"query:{at}", "expr": query.replace("$__rate_interval", "5m")} for at, query in enumerate(queries)]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "queries.yaml"
            path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
            done = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_panels_do_not_overlap(self):
        dashboard = json.loads((CHART / "files/dashboard.json").read_text())
        taken = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            self.assertLessEqual(at["x"] + at["w"], 24, panel["title"])
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, panel["title"])
            taken |= cells
        ids = [panel["id"] for panel in dashboard["panels"]]
        self.assertEqual(len(ids), len(set(ids)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
