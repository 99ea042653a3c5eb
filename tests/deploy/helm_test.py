"""The chart: rendered for every ci values file and checked against Kubernetes' schemas; wrong values refused."""

import functools
import itertools
import json
import pathlib
import re
import tempfile
import unittest

import yaml

import support
from topology import Topology

CHART = support.SOURCE / "deploy/helm/tributary"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
# The oldest version the chart is for, and the newest the validator knows.
KUBERNETES = ["1.28.0", "1.34.0"]
OPERATORS = ["monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule",
             "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"]
# Kinds of operators have no schema in the validator: the fields their APIs know, of the objects the chart makes.
OWN_KINDS = {
    "ServiceMonitor": {
        "spec": {"endpoints", "jobLabel", "namespaceSelector", "podTargetLabels", "selector", "targetLabels"},
        "spec.endpoints": {"bearerTokenSecret", "interval", "metricRelabelings", "path", "port", "relabelings", "scheme",
                           "scrapeTimeout", "tlsConfig"},
        "spec.namespaceSelector": {"any", "matchNames"},
        "spec.selector": {"matchExpressions", "matchLabels"}},
    "PrometheusRule": {
        "spec": {"groups"},
        "spec.groups": {"interval", "labels", "limit", "name", "rules"},
        "spec.groups.rules": {"alert", "annotations", "expr", "for", "keep_firing_for", "labels", "record"}},
    "LeaderWorkerSet": {
        "spec": {"leaderWorkerTemplate", "networkConfig", "replicas", "rolloutStrategy", "startupPolicy"},
        "spec.leaderWorkerTemplate": {"leaderTemplate", "restartPolicy", "size", "subGroupPolicy", "workerTemplate"}},
}


def setUpModule():
    support.need_tool("render")
    support.need_tool("venv/bin/kubernetes-validate")


def render(*values, sets=(), apis=(), kubernetes=KUBERNETES[-1], text=None, notes=False):
    """(exit code, output) of the renderer."""
    words = [word for file in values for word in ("-f", file)]
    words += [word for one in sets for word in ("-set", one)]
    words += [word for one in apis for word in ("-api-versions", one)]
    if notes:
        words.append("-notes")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as extra:
        if text is not None:
            extra.write(text)
            extra.flush()
            words += ["-f", extra.name]
        result = support.run(support.need_tool("render"), "-kube-version", "v" + kubernetes, *words, CHART)
    return result.returncode, result.stdout


def objects(*values, **options):
    code, text = render(*values, **options)
    if code != 0:
        raise AssertionError(text)
    return [document for document in yaml.safe_load_all(text) if document]


def validate(documents, kubernetes):
    """What kubernetes-validate says against objects of Kubernetes' own kinds: "" when nothing."""
    program = support.need_tool("venv/bin/kubernetes-validate")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all([d for d in documents if d["kind"] not in OWN_KINDS], file)
        file.flush()
        result = support.run(program, "--strict", "-k", kubernetes, "--quiet", file.name)
    return "" if result.returncode == 0 and not result.stdout else result.stdout


def pod_templates(documents):
    """{component: pod template} of everything that makes pods, `helm test` included."""
    found = {}
    for document in documents:
        template = {"Deployment": lambda d: d["spec"]["template"],
                    "StatefulSet": lambda d: d["spec"]["template"],
                    "LeaderWorkerSet": lambda d: d["spec"]["leaderWorkerTemplate"]["workerTemplate"],
                    "Pod": lambda d: d}.get(document["kind"])
        if template:
            pod = template(document)
            found[pod["metadata"]["labels"]["app.kubernetes.io/component"]] = pod
    return found


def by_kind(documents, kind):
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def container(pod):
    return pod["spec"]["containers"][0]


def ports_of(pod):
    return {port["name"]: port["containerPort"] for port in container(pod).get("ports", [])}


def matches(selector, pod):
    return selector.items() <= pod["metadata"]["labels"].items()


def for_every_values(test):
    """Calls the test with the objects of every ci values file."""

    @functools.wraps(test)
    def each(self):
        for values in CI_VALUES:
            with self.subTest(values.name):
                test(self, objects(values, apis=OPERATORS))

    return each


class Rendered(unittest.TestCase):
    """What holds for every set of values."""

    def test_objects_are_what_kubernetes_takes(self):
        for values, version in itertools.product(CI_VALUES, KUBERNETES):
            with self.subTest(values=values.name, kubernetes=version):
                documents = objects(values, apis=OPERATORS, kubernetes=version)
                self.assertGreater(len(documents), 5)
                self.assertEqual(validate(documents, version), "")

    def test_the_validator_is_strict(self):
        documents = objects(CI_VALUES[0], apis=OPERATORS)
        container(pod_templates(documents)["worker"])["securitycontext"] = {}
        self.assertIn("securitycontext", validate(documents, KUBERNETES[0]))

    @for_every_values
    def test_objects_are_what_operators_take(self, documents):
        for document in documents:
            for path, fields in OWN_KINDS.get(document["kind"], {}).items():
                found = [document]
                for key in path.split("."):
                    found = [value for one in found
                             for value in (one[key] if isinstance(one[key], list) else [one[key]])]
                for one in found:
                    self.assertLessEqual(set(one), fields, f"{document['kind']} {path}")

    def test_pods_of_other_kinds_too(self):
        documents = objects(CHART / "ci/lws-values.yaml", apis=OPERATORS)
        lws = by_kind(documents, "LeaderWorkerSet")["tributary-worker"]
        self.assertEqual(lws["spec"]["leaderWorkerTemplate"]["size"], 2)
        self.assertNotIn("StatefulSet", [d["kind"] for d in documents])
        self.assertNotIn("tributary-worker", by_kind(documents, "Service"), "the set makes one of that name itself")
        template = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        template["metadata"]["name"] = "worker"
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        self.assertEqual(validate([pod], KUBERNETES[0]), "")

    def test_rendered_yaml_is_clean(self):
        rules = "{rules: {key-duplicates: enable, indentation: disable, line-length: disable, trailing-spaces: disable}}"
        for values in CI_VALUES:
            code, text = render(values, apis=OPERATORS)
            self.assertEqual(code, 0, text)
            result = support.run(support.need("yamllint"), "--strict", "-d", rules, "-", input=text)
            self.assertEqual(result.returncode, 0, f"{values.name}\n{result.stdout}")

    @for_every_values
    def test_labels(self, documents):
        for document in documents:
            labels = document["metadata"]["labels"]
            for name in ("name", "instance", "version", "component", "part-of", "managed-by"):
                self.assertIn(f"app.kubernetes.io/{name}", labels, document["kind"])
            self.assertIn("helm.sh/chart", labels)

    @for_every_values
    def test_selectors_find_their_pods(self, documents):
        pods = pod_templates(documents)
        for service in by_kind(documents, "Service").values():
            found = [pod for pod in pods.values() if matches(service["spec"]["selector"], pod)]
            self.assertEqual(len(found), 1, service["metadata"]["name"])
            for port in service["spec"]["ports"]:
                self.assertEqual(ports_of(found[0])[port["targetPort"]], port["port"])
        for kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            for one in by_kind(documents, kind).values():
                selector = one["spec"]["selector"]["matchLabels"]
                self.assertEqual(set(selector), {"app.kubernetes.io/name", "app.kubernetes.io/instance",
                                                 "app.kubernetes.io/component"})
                self.assertTrue(any(matches(selector, pod) for pod in pods.values()))

    @for_every_values
    def test_nobody_runs_as_root_or_writes_to_the_image(self, documents):
        for component, pod in pod_templates(documents).items():
            self.assertTrue(pod["spec"]["securityContext"]["runAsNonRoot"], component)
            self.assertEqual(pod["spec"]["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertFalse(pod["spec"]["automountServiceAccountToken"], component)
            context = container(pod)["securityContext"]
            self.assertTrue(context["readOnlyRootFilesystem"])
            self.assertFalse(context["allowPrivilegeEscalation"])
            self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
            self.assertIn("resources", container(pod))

    @for_every_values
    def test_probes_ask_the_admin_port(self, documents):
        for component in ("coordinator", "worker"):
            pod = pod_templates(documents)[component]
            for probe, service in [("startupProbe", "liveness"), ("livenessProbe", "liveness"),
                                   ("readinessProbe", "readiness")]:
                asked = container(pod)[probe]["grpc"]
                self.assertEqual(asked, {"port": ports_of(pod)["admin"], "service": service}, probe)

    @for_every_values
    def test_volumes_are_there_and_used(self, documents):
        for component, pod in pod_templates(documents).items():
            volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
            mounts = [mount["name"] for mount in container(pod).get("volumeMounts", [])]
            self.assertEqual(sorted(volumes), sorted(mounts), component)

    @for_every_values
    def test_grace_is_longer_than_the_drain(self, documents):
        settings = by_kind(documents, "ConfigMap")["tributary"]["data"]
        for component in ("coordinator", "worker"):
            drain = yaml.safe_load(settings[f"{component}.yaml"])["drain_timeout"]
            pod = pod_templates(documents)[component]
            self.assertGreater(pod["spec"]["terminationGracePeriodSeconds"], int(drain.rstrip("s")))


class Sections(unittest.TestCase):
    """What a section of the values adds, and what is not there without it."""

    SMALLEST = {"ConfigMap", "Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount",
                "StatefulSet"}

    @staticmethod
    def kinds(documents):
        return {document["kind"] for document in documents}

    def test_each_kind_comes_with_its_values(self):
        off = {"networkPolicy": "NetworkPolicy", "podDisruptionBudget": "PodDisruptionBudget"}
        on = {"serviceMonitor": "ServiceMonitor", "prometheusRule": "PrometheusRule"}
        cpu = CHART / "ci/cpu-values.yaml"
        self.assertEqual(self.kinds(objects(cpu, apis=OPERATORS)), self.SMALLEST)
        for section, kind in off.items():
            self.assertEqual(self.kinds(objects(cpu, sets=[f"{section}.enabled=false"])), self.SMALLEST - {kind})
        self.assertEqual(self.kinds(objects(cpu, sets=["serviceAccount.create=false"])),
                         self.SMALLEST - {"ServiceAccount"})
        for section, kind in on.items():
            documents = objects(cpu, apis=OPERATORS, sets=[f"metrics.{section}.enabled=true",
                                                           "networkPolicy.prometheus=[{podSelector: {}}]"])
            self.assertEqual(self.kinds(documents), self.SMALLEST | {kind})
        self.assertEqual(self.kinds(objects(cpu, apis=OPERATORS, sets=["worker.controller=lws"])),
                         self.SMALLEST - {"StatefulSet"} | {"LeaderWorkerSet"})
        self.assertEqual(self.kinds(objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS)),
                         self.SMALLEST | set(on.values()))

    def test_dashboards_and_metrics_ports(self):
        cpu = CHART / "ci/cpu-values.yaml"
        count = len(list((CHART / "dashboards").glob("*.json")))
        with_dashboards = by_kind(objects(cpu, sets=["metrics.dashboards.enabled=true"]), "ConfigMap")
        self.assertEqual(len(with_dashboards), 1 + count)
        without = objects(cpu, sets=["metrics.enabled=false"])
        self.assertEqual(len(by_kind(without, "ConfigMap")), 1)
        self.assertEqual({name for name in by_kind(without, "Service") if name.endswith("-metrics")}, set())
        for pod in pod_templates(without).values():
            self.assertNotIn("metrics", ports_of(pod))

    def test_what_is_encrypted_is_not_called_plain(self):
        for values, protocol in (("cpu", "kubernetes.io/h2c"), ("gpu", None)):
            services = by_kind(objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS), "Service")
            self.assertEqual(services["tributary"]["spec"]["ports"][0].get("appProtocol"), protocol, values)

    def test_tracing_is_the_coordinators(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["tracing.sample=0.25", "tracing.spans=0"])
        data = by_kind(documents, "ConfigMap")["tributary"]["data"]
        settings = yaml.safe_load(data["coordinator.yaml"])
        self.assertEqual((settings["trace_sample"], settings["trace_spans"]), (0.25, 0))
        self.assertNotIn("trace_sample", data["worker.yaml"])

    def test_the_test_pod_shows_a_certificate_that_may_call(self):
        def secrets(*sets):
            documents = objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS, sets=sets)
            volume = next(v for v in pod_templates(documents)["test"]["spec"]["volumes"] if v["name"] == "identity")
            return [source["secret"]["name"] for source in volume["projected"]["sources"]]

        self.assertIn("tributary-worker-tls", secrets())
        self.assertIn("of-the-test", secrets("tls.testSecret=of-the-test"))
        self.assertNotIn("tributary-worker-tls", secrets("tls.testSecret=of-the-test"))
        refused = "The test will be refused"
        for sets, said in (([], False), (['auth.testTokenSecret=""'], True),
                           (['auth.testTokenSecret=""', "tls.testSecret=s"], False)):
            code, notes = render(CHART / "ci/gpu-values.yaml", apis=OPERATORS, sets=sets, notes=True)
            self.assertEqual(code, 0, notes)
            self.assertEqual(refused in notes, said, sets)


class Group(unittest.TestCase):
    """What makes the pods one group."""

    def setUp(self):
        self.documents = objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS)
        self.pods = pod_templates(self.documents)

    def test_workers_start_together_and_are_found_before_they_are_ready(self):
        stateful = by_kind(self.documents, "StatefulSet")["tributary-worker"]["spec"]
        self.assertEqual(stateful["podManagementPolicy"], "Parallel")
        self.assertEqual(stateful["updateStrategy"], {"type": "OnDelete"})
        self.assertEqual(stateful["replicas"], 8)
        headless = by_kind(self.documents, "Service")[stateful["serviceName"]]["spec"]
        self.assertEqual(headless["clusterIP"], "None")
        self.assertTrue(headless["publishNotReadyAddresses"])

    def test_the_coordinator_is_found_by_workers_before_it_is_ready_and_by_hosts_after(self):
        services = by_kind(self.documents, "Service")
        self.assertTrue(services["tributary-registration"]["spec"]["publishNotReadyAddresses"])
        self.assertNotIn("publishNotReadyAddresses", services["tributary"]["spec"])
        settings = yaml.safe_load(by_kind(self.documents, "ConfigMap")["tributary"]["data"]["worker.yaml"])
        port = services["tributary-registration"]["spec"]["ports"][0]["port"]
        self.assertEqual(settings["coordinator"], f"tributary-registration:{port}")

    def test_one_coordinator_at_a_time(self):
        deployment = by_kind(self.documents, "Deployment")["tributary-coordinator"]["spec"]
        self.assertEqual((deployment["replicas"], deployment["strategy"]), (1, {"type": "Recreate"}))

    def test_rank_is_the_pods_index(self):
        env = {e["name"]: e for e in container(self.pods["worker"])["env"]}
        self.assertEqual(env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"],
                         "metadata.labels['apps.kubernetes.io/pod-index']")
        self.assertIn("--rank=$(RANK)", container(self.pods["worker"])["args"])

    def test_coordinator_and_workers_agree_on_the_device(self):
        data = by_kind(self.documents, "ConfigMap")["tributary"]["data"]
        for file in ("coordinator.yaml", "worker.yaml"):
            self.assertEqual(yaml.safe_load(data[file])["device"], "cuda", file)

    def test_each_gpu_worker_has_one_gpu(self):
        worker = self.pods["worker"]["spec"]
        limits = worker["containers"][0]["resources"]["limits"]
        self.assertEqual(limits, {"memory": "32Gi", "nvidia.com/gpu": "1"})
        self.assertIn({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, worker["tolerations"])
        self.assertEqual(worker["runtimeClassName"], "nvidia")
        shm = next(v for v in worker["volumes"] if v["name"] == "shm")
        self.assertEqual(shm["emptyDir"], {"medium": "Memory", "sizeLimit": "8Gi"})
        for component in ("coordinator", "test"):
            self.assertNotIn("nvidia.com/gpu", json.dumps(self.pods[component]["spec"]["containers"][0]["resources"]))

    def test_nccl_uses_the_pods_interface_unless_another_is_named(self):
        def interfaces(values):
            documents = objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS, text=values)
            env = container(by_kind(documents, "StatefulSet")["tributary-worker"]["spec"]["template"])["env"]
            return [e["value"] for e in env if e["name"] == "NCCL_SOCKET_IFNAME"]
        self.assertEqual(interfaces(""), ["eth0"])
        self.assertEqual(interfaces("worker: {extraEnv: [{name: NCCL_SOCKET_IFNAME, value: net1}]}\n"), ["net1"])

    def test_workers_refuse_caches_before_they_are_killed(self):
        for memory, limit in [("16Gi", 15461882265), ("500M", 450000000), ("1.5Gi", 1449551462)]:
            documents = objects(CHART / "ci/cpu-values.yaml", sets=[f"worker.resources.limits.memory={memory}"])
            self.assertEqual(self.worker_settings(documents)["memory_limit"], limit)
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.settings.memory_limit=1000000"])
        self.assertEqual(self.worker_settings(documents)["memory_limit"], 1000000)
        self.assertNotIn("memory_limit", self.worker_settings(self.documents), "a GPU's memory is not the pod's")

    def test_workers_run_as_many_threads_as_they_have_cpus(self):
        for key, cpus, threads in [("requests", "6", 6), ("requests", "2500m", 3), ("limits", "2", 2)]:
            text = f'tls: {{insecure: true}}\nworker: {{resources: {{{key}: {{cpu: "{cpus}"}}}}}}\n'
            self.assertEqual(self.worker_settings(objects(text=text))["threads"], threads)

    @staticmethod
    def worker_settings(documents):
        return yaml.safe_load(by_kind(documents, "ConfigMap")["tributary"]["data"]["worker.yaml"])

    def test_nobody_but_the_coordinator_gets_its_key(self):
        for component in ("worker", "test"):
            sources = next(v for v in self.pods[component]["spec"]["volumes"] if v["name"] == "identity")
            for source in sources["projected"]["sources"]:
                if source["secret"]["name"] == "tributary-tls":
                    self.assertEqual([item["key"] for item in source["secret"]["items"]], ["ca.crt"])

    def test_evictions_wait(self):
        budgets = by_kind(self.documents, "PodDisruptionBudget")
        self.assertEqual(budgets["tributary-worker"]["spec"]["maxUnavailable"], 0)
        self.assertEqual(budgets["tributary-coordinator"]["spec"]["minAvailable"], 1)

    def test_network_policy_names_who_may_talk(self):
        policies = by_kind(self.documents, "NetworkPolicy")
        for name, policy in policies.items():
            self.assertEqual(policy["spec"]["policyTypes"], ["Ingress", "Egress"])
            pod = next(p for p in self.pods.values() if matches(policy["spec"]["podSelector"]["matchLabels"], p))
            for rule in policy["spec"]["ingress"]:
                self.assertTrue(rule["from"], f"{name}: open to everybody")
                for port in rule["ports"]:
                    if "port" in port:
                        self.assertIn(port["port"], ports_of(pod))
        coordinator = policies["tributary-coordinator"]["spec"]
        self.assertEqual(coordinator["ingress"][0]["from"][0],
                         {"namespaceSelector": {"matchLabels": {"team": "inference"}}})
        self.assertEqual(coordinator["egress"], [])
        between = policies["tributary-worker"]["spec"]["ingress"][0]
        self.assertEqual(between["ports"], [{"protocol": "TCP"}], "Gloo and NCCL pick their ports")

    def test_prometheus_finds_every_pod(self):
        services = by_kind(self.documents, "Service")
        for name, monitor in by_kind(self.documents, "ServiceMonitor").items():
            selector = monitor["spec"]["selector"]["matchLabels"]
            found = [s for s in services.values() if selector.items() <= s["metadata"]["labels"].items()]
            self.assertEqual(len(found), 1, name)
            ports = [p["name"] for p in found[0]["spec"]["ports"]]
            self.assertIn(monitor["spec"]["endpoints"][0]["port"], ports)
            self.assertTrue(found[0]["spec"]["publishNotReadyAddresses"], "metrics of pods that are not ready")

    def test_rules_and_dashboards_are_the_files_as_they_stand(self):
        rule = by_kind(self.documents, "PrometheusRule")["tributary"]
        self.assertEqual(rule["spec"], yaml.safe_load((CHART / "rules/tributary.yaml").read_text(encoding="utf-8")))
        for file in (CHART / "dashboards").glob("*.json"):
            dashboard = by_kind(self.documents, "ConfigMap")[f"tributary-dashboard-{file.stem}"]
            self.assertEqual(dashboard["metadata"]["labels"]["grafana_dashboard"], "1")
            self.assertEqual(json.loads(dashboard["data"][file.name]), json.loads(file.read_text(encoding="utf-8")))

    def test_image_and_notes(self):
        self.assertEqual(container(self.pods["worker"])["image"],
                         "registry.example.com/tributary@sha256:" + "0123456789abcdef" * 4)
        cpu = pod_templates(objects(CHART / "ci/cpu-values.yaml"))
        version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
        self.assertEqual(container(cpu["worker"])["image"], f"tributary:{version}-cpu")
        code, notes = render(CHART / "ci/cpu-values.yaml", notes=True)
        self.assertEqual(code, 0, notes)
        self.assertIn("Node drains will block", notes)
        self.assertIn("plain text", notes)


class Refused(unittest.TestCase):
    """Wrong values, and the message that says what to set."""

    def test_each_for_its_reason(self):
        ok = "tls: {insecure: true}\n"
        tls = "tls: {enabled: true, existingSecret: s, %s}\n"
        cases = [
            # Values against each other (templates/validations.yaml).
            ("", "Set tls.enabled=true and tls.existingSecret, or tls.insecure=true"),
            ("tls: {enabled: true}\n", "tls.existingSecret is empty: set it to a Secret"),
            (tls % "insecure: true", "tls.enabled and tls.insecure contradict"),
            ("tls: {insecure: true, clientAuth: true, workerSecret: s}\n", "tls.clientAuth needs tls.enabled=true"),
            (tls % "clientAuth: true", "tls.workerSecret is empty"),
            (tls % "clientNames: [a]", "count only with tls.clientAuth=true"),
            (tls % "clientAuth: false" + "auth: {tokenSecret: s}\n",
             "set auth.workerTokenSecret, or tls.clientAuth=true"),
            (tls % "clientAuth: true, workerSecret: s, clientNames: [a]", "so workers must show who they are"),
            (tls % "clientAuth: true, workerSecret: s, workerNames: [a]", "set tls.clientNames, or auth.tokenSecret"),
            (tls % "clientAuth: false" + "auth: {testTokenSecret: s}\n", "set auth.tokenSecret, which lists them"),
            (tls % "testSecret: s", "tls.testSecret counts only with tls.clientAuth=true"),
            (ok + "auth: {workerTokenSecret: s}\n", "auth: tokens are not sent in plain text"),
            (ok + "coordinator: {replicas: 2}\n", "coordinator.replicas must be 1"),
            (ok + "worker: {gpusPerPod: 2, backend: gpu}\n", "worker.gpusPerPod must be 1"),
            (ok + 'worker: {resources: {limits: {nvidia.com/gpu: "1"}}}\n', "set worker.backend=gpu"),
            (ok + "terminationGracePeriodSeconds: 60\n", "set it above timeouts.drainSeconds + timeouts.stepSeconds (60)"),
            (ok + "grpc: {adminPort: 7400}\n", "must differ, are 7400, 7400, 7402, 9464"),
            (ok + "coordinator: {settings: {listen: x}}\n", "coordinator.settings.listen is set by the chart"),
            (tls % "clientAuth: false" + "coordinator: {settings: {insecure: true}}\n",
             "coordinator.settings.insecure is set by the chart"),
            (ok + "coordinator: {settings: {drain_timeout: 300s}}\n",
             "coordinator.settings.drain_timeout is set by the chart"),
            (ok + "worker: {settings: {rank: 1}}\n", "worker.settings.rank is set by the chart"),
            (ok + "worker: {settings: {token_file: x}}\n", "worker.settings.token_file is set by the chart"),
            (ok + "metrics: {enabled: false, serviceMonitor: {enabled: true}}\n", "needs metrics.enabled=true"),
            (ok + "metrics: {enabled: false, prometheusRule: {enabled: true}}\n",
             "metrics.prometheusRule.enabled needs metrics.enabled=true"),
            (ok + "metrics: {serviceMonitor: {enabled: true}}\n", "networkPolicy.prometheus is empty"),
            (ok + "metrics: {serviceMonitor: {enabled: true}}\n", "the cluster has no ServiceMonitor"),
            (ok + "metrics: {prometheusRule: {enabled: true}}\n", "the cluster has no PrometheusRule"),
            (ok + "worker: {controller: lws}\n", "--api-versions leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"),
            # One value by itself (values.schema.json).
            (ok + "workers: {count: 4}\n", "Additional property workers is not allowed"),
            (ok + "worker: {conut: 4}\n", "worker: Additional property conut is not allowed"),
            (ok + "worker: {count: 0}\n", "worker.count: Must be greater than or equal to 1"),
            (ok + 'worker: {count: "4"}\n', "worker.count: Invalid type. Expected: integer, given: string"),
            (ok + "worker: {backend: rocm}\n", "worker.backend: worker.backend must be one of"),
            (ok + "worker: {shmSize: 1 GB}\n", "worker.shmSize: Does not match pattern"),
            (ok + "worker: {resources: {limits: {cpu: 4}}}\n", "worker.resources.limits.cpu: Invalid type"),
            (ok + "image: {tag: latest}\n", "image.tag: Must not validate the schema (not)"),
            (ok + "image: {digest: abc}\n", "image.digest: Does not match pattern"),
            (ok + "grpc: {port: 80}\n", "grpc.port: Must be greater than or equal to 1024"),
            (ok + "grpc: {maxMessageBytes: 4294967296}\n", "grpc.maxMessageBytes: Must be less than or equal to"),
            (ok + "tracing: {sample: 2}\n", "tracing.sample: Must be less than or equal to 1"),
            (ok + "tracing: {otlp: x}\n", "tracing: Additional property otlp is not allowed"),
            (ok + "networkPolicy: {clients: {a: b}}\n", "networkPolicy.clients: Invalid type"),
            (ok + "podDisruptionBudget: {minAvailable: 1}\n", "podDisruptionBudget: Additional property minAvailable"),
            (ok + "metrics: {serviceMonitor: {interval: often}}\n", "serviceMonitor.interval: Does not match pattern"),
            (ok + "worker: {lws: {restartPolicy: Always}}\n", "worker.lws.restartPolicy must be one of"),
            (ok + "logging: {level: verbose}\n", "logging.level: logging.level must be one of"),
            (ok + "coordinator: {settings: {--listen: x}}\n", 'Property name of "--listen" does not match'),
        ]
        for values, reason in cases:
            with self.subTest(values):
                code, said = render(text=values)
                self.assertEqual(code, 1, said)
                self.assertIn(reason, said)

    def test_several_reasons_at_once(self):
        code, said = render(text="coordinator: {replicas: 2}\nworker: {gpusPerPod: 0}\n")
        self.assertEqual(code, 1)
        for reason in ("tls:", "coordinator.replicas", "worker.gpusPerPod"):
            self.assertIn(f"- {reason}", said)

    def test_old_kubernetes(self):
        code, said = render(CI_VALUES[0], kubernetes="1.27.9")
        self.assertEqual(code, 1)
        self.assertIn("chart requires kubeVersion: >=1.28-0", said)

    def test_what_kubernetes_would_refuse(self):
        documents = objects(text="tls: {insecure: true}\nworker: {extraEnv: [{name: A, worth: b}]}\n")
        self.assertIn("worth", validate(documents, KUBERNETES[0]))


class Documented(unittest.TestCase):
    def test_the_readme_names_every_section_of_values(self):
        text = (CHART / "README.md").read_text(encoding="utf-8")
        for section in yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")):
            self.assertIn(f"`{section}`", text)


class Release(unittest.TestCase):
    """A rendered release as processes of this machine: the programs take its settings and files, and serve."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    @staticmethod
    def files_of(volume, maps):
        """{path in the volume: text} of a volume that is made from ConfigMaps and Secrets."""
        sources = volume.get("projected", {}).get("sources", [volume])
        files = {}
        for source in sources:
            if reference := source.get("configMap") or source.get("secret"):
                data = maps[reference.get("name") or reference["secretName"]]
                items = reference.get("items") or [{"key": key, "path": key} for key in data]
                files |= {item["path"]: data[item["key"]] for item in items}
        return files

    def start_of(self, name, pod, rank, topology, maps):
        """The command of a pod's container, with its mounted files laid out in a folder of its own."""
        root = self.folder / name
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for mount in container(pod).get("volumeMounts", []):
            place = root / mount["mountPath"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            for file, text in self.files_of(volumes[mount["name"]], maps).items():
                text = topology.translate(name, text).replace("/etc/tributary/", f"{root}/etc/tributary/")
                (place / file).write_text(text, encoding="utf-8")
        variables = {"$(POD_IP)": "127.0.0.1", "$(RANK)": str(rank)}
        words = [re.sub(r"\$\(\w+\)", lambda m: variables[m[0]], word) for word in container(pod)["args"]]
        return [word.replace("/etc/tributary/", f"{root}/etc/tributary/") for word in words]

    def serve(self, documents, workers, secrets):
        """Starts the release, runs the pod of `helm test`, and ends it."""
        pods = pod_templates(documents)
        maps = secrets | {name: one["data"] for name, one in by_kind(documents, "ConfigMap").items()}
        ranks = {"coordinator": 0} | {f"worker-{rank}": rank for rank in range(workers)}
        topology = Topology({name: {} for name in [*ranks, "test"]},
                            {"tributary": "coordinator", "tributary-registration": "coordinator"})
        self.addCleanup(topology.kill)
        for name, rank in ranks.items():
            pod = pods[name.split("-")[0]]
            admin = f"--admin=127.0.0.1:{container(pod)['readinessProbe']['grpc']['port']}"
            topology.services[name] = {
                "command": self.start_of(name, pod, rank, topology, maps),
                "healthcheck": {"test": ["CMD", "tributary", "health", admin]},
                "stop_grace_period": f"{pod['spec']['terminationGracePeriodSeconds']}s"}
        check = self.start_of("test", pods["test"], 0, topology, maps)
        del topology.services["test"]
        topology.start_in_order()
        topology.wait_until_healthy(60)
        result = support.run(*topology.local("coordinator", check))
        logs = "\n".join(process.output() for process in topology.processes.values())
        self.assertEqual(result.returncode, 0, f"{result.stdout}\n{logs}")
        self.assertIn(f"{workers} ranks", result.stdout)
        self.assertEqual(topology.stop(), {name: 0 for name in ranks})
        return topology

    def test_the_smallest(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.count=2", 'worker.resources.requests.cpu="1"'])
        self.serve(documents, 2, {})

    def certificate(self, name, names, authority=None):
        """{tls.crt, tls.key} signed by an authority of this test; without one, the authority itself."""
        key, certificate = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                   "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", certificate]
        if authority:
            command += ["-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE",
                        "-CA", self.folder / f"{authority}.crt", "-CAkey", self.folder / f"{authority}.key"]
        result = support.run(*command)
        self.assertEqual(result.returncode, 0, result.stdout)
        return {"tls.crt": certificate.read_text(encoding="utf-8"), "tls.key": key.read_text(encoding="utf-8")}

    def test_with_certificates_and_tokens(self):
        support.need("openssl")
        documents = objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS,
                            sets=["worker.count=2", "worker.backend=cpu", 'worker.resources.requests.cpu="1"'])
        authority = self.certificate("authority", "")
        token = "t0ken-of-the-test-pod"
        secrets = {
            "tributary-tls": self.certificate("server", "DNS:tributary,IP:127.0.0.1", "authority")
                             | {"ca.crt": authority["tls.crt"]},
            "tributary-worker-tls": self.certificate("worker", "DNS:workers.tributary.example.com", "authority"),
            "tributary-tokens": {"tokens": f"helm-test client {token}\n"},
            "tributary-test-token": {"token": token + "\n"},
        }
        self.serve(documents, 2, secrets)


if __name__ == "__main__":
    support.main(isolated=True)
