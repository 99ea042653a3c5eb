"""The chart: rendered for every ci values file and checked against Kubernetes' schemas; wrong values refused."""

import functools
import itertools
import json
import os
import pathlib
import re
import tempfile
import unittest
import urllib.request

import yaml

import metrics_doc
import support
from topology import Topology

CHART = support.SOURCE / "deploy/helm/tributary"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
# The oldest version the chart is for, and the newest the validator knows.
KUBERNETES = ["1.28.0", "1.34.0"]
# Values that need what came later: containers of MPS that go on running, resource claims.
NEED_NEWEST = {"node-values.yaml", "nodes-values.yaml"}
OPERATORS = ["monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule",
             "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet", "keda.sh/v1alpha1/ScaledObject"]
# Kinds of operators, of which kubernetes-validate has no schema: operators.py has.
OPERATORS_KINDS = {name.rsplit("/", 1)[1] for name in OPERATORS}


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
        yaml.safe_dump_all([d for d in documents if d["kind"] not in OPERATORS_KINDS], file)
        file.flush()
        result = support.run(program, "--strict", "-k", kubernetes, "--quiet", file.name)
    return "" if result.returncode == 0 and not result.stdout else result.stdout


def validate_operators(documents):
    """What the CRDs' schemas say against objects of operators: "" when nothing."""
    result = support.run(support.need_tool("venv/bin/python"), "-B", pathlib.Path(__file__).parent / "operators.py",
                         input=yaml.safe_dump_all(documents))
    if result.returncode != 0:
        raise AssertionError(result.stdout)
    return result.stdout


def pod_templates(documents):
    """{component: pod template} of everything that makes pods, `helm test` included; of one of several groups under
    "worker-g0" and so on."""
    found = {}
    for document in documents:
        template = {"StatefulSet": lambda d: d["spec"]["template"],
                    "LeaderWorkerSet": lambda d: d["spec"]["leaderWorkerTemplate"]["workerTemplate"],
                    "Pod": lambda d: d}.get(document["kind"])
        if template:
            pod = template(document)
            labels = pod["metadata"]["labels"]
            group = f"-g{labels['tributary/group']}" if "tributary/group" in labels else ""
            found[labels["app.kubernetes.io/component"] + group] = pod
    return found


def by_kind(documents, kind):
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def container(pod):
    return pod["spec"]["containers"][0]


def containers(pod):
    """The chart's own: those of hosts are the user's."""
    return [one for one in pod["spec"]["containers"] if one["name"] != "host"]


def ports_of(pod):
    return {port["name"]: port["containerPort"] for one in pod["spec"]["containers"] for port in one.get("ports", [])}


def settings_of(documents):
    """{file: settings} of the release, or of the first of its groups."""
    maps = by_kind(documents, "ConfigMap")
    data = maps["tributary" if "tributary" in maps else "tributary-g0"]["data"]
    return {file: yaml.safe_load(text) for file, text in data.items()}


def matches(selector, pod):
    return selector.items() <= pod["metadata"]["labels"].items()


def selects(selector, pod):
    """The same of a selector that may have expressions, which are all of the kind In here."""
    labels = pod["metadata"]["labels"]
    return matches(selector["matchLabels"], pod) and all(
        labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


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
            if values.name in NEED_NEWEST and version != KUBERNETES[-1]:
                continue
            with self.subTest(values=values.name, kubernetes=version):
                documents = objects(values, apis=OPERATORS, kubernetes=version)
                self.assertGreater(len(documents), 5)
                self.assertEqual(validate(documents, version), "")

    def test_the_validator_is_strict(self):
        documents = objects(CI_VALUES[0], apis=OPERATORS)
        container(pod_templates(documents)["worker"])["securitycontext"] = {}
        self.assertIn("securitycontext", validate(documents, KUBERNETES[0]))

    def test_objects_are_what_operators_take(self):
        documents = [document for values in CI_VALUES for document in objects(values, apis=OPERATORS)]
        documents += objects(CHART / "ci/cpu-values.yaml", apis=OPERATORS, sets=["worker.controller=lws"])
        found = [document for document in documents if document["kind"] in OPERATORS_KINDS]
        self.assertEqual({document["kind"] for document in found}, OPERATORS_KINDS, "no kind is left out")
        self.assertEqual(validate_operators(found), "")

    def test_a_field_that_operators_do_not_know_is_refused(self):
        documents = [document for values in ("gpu", "nodes", "scaled")
                     for document in objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS)
                     if document["kind"] in OPERATORS_KINDS]
        for document in documents:
            spec = document["spec"]
            key = {"ServiceMonitor": "endpoints", "PrometheusRule": "groups", "LeaderWorkerSet": "rolloutStrategy",
                   "ScaledObject": "triggers"}[document["kind"]]
            inner = spec[key][0] if isinstance(spec[key], list) else spec[key]
            inner["misspelt"] = "x"
        problems = validate_operators(documents).splitlines()
        self.assertEqual(len(problems), len(documents), problems)
        for problem in problems:
            self.assertIn("misspelt", problem)
        lws = by_kind(objects(CHART / "ci/nodes-values.yaml", apis=OPERATORS), "LeaderWorkerSet")["tributary-worker"]
        lws["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
        self.assertIn("restartPolicy: 'Never' is not one of", validate_operators([lws]))

    def test_pods_of_other_kinds_too(self):
        for values, version in (("lws", KUBERNETES[0]), ("nodes", KUBERNETES[-1])):
            documents = objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS)
            lws = by_kind(documents, "LeaderWorkerSet")["tributary-worker"]
            self.assertEqual(lws["spec"]["leaderWorkerTemplate"]["size"], 2)
            self.assertNotIn("tributary-worker", by_kind(documents, "StatefulSet"))
            self.assertNotIn("tributary-worker", by_kind(documents, "Service"), "the set makes one of that name itself")
            template = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            template["metadata"]["name"] = "worker"
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            self.assertEqual(validate([pod], version), "")

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
            selector = service["spec"]["selector"]
            found = [pod for pod in pods.values() if matches(selector, pod)]
            whole = [pod for name, pod in pods.items() if name.startswith(selector["app.kubernetes.io/component"])]
            # Of one group, or of all that there are.
            self.assertEqual(len(found), 1 if "tributary/group" in selector else len(whole), service["metadata"]["name"])
            for port in service["spec"]["ports"]:
                self.assertEqual(ports_of(found[0])[port["targetPort"]], port["port"])
            names = [port["name"] for port in service["spec"]["ports"]]
            self.assertEqual(len(names), len(set(names)))
        names = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
        for kind in ("StatefulSet", "PodDisruptionBudget"):
            for one in by_kind(documents, kind).values():
                selector = one["spec"]["selector"]
                labels = selector["matchLabels"] | {
                    e["key"]: e["values"] for e in selector.get("matchExpressions", [])}
                self.assertEqual(set(labels) - {"tributary/group"}, names)
                self.assertEqual(sum(selects(selector, pod) for pod in pods.values()),
                                 2 if "matchExpressions" in selector else 1)

    @for_every_values
    def test_nobody_runs_as_root_or_writes_to_the_image(self, documents):
        for component, pod in pod_templates(documents).items():
            self.assertTrue(pod["spec"]["securityContext"]["runAsNonRoot"], component)
            self.assertEqual(pod["spec"]["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertFalse(pod["spec"]["automountServiceAccountToken"], component)
            for one in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
                context = one["securityContext"]
                self.assertTrue(context["readOnlyRootFilesystem"])
                self.assertFalse(context["allowPrivilegeEscalation"])
                self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
                self.assertIn("resources", one)

    @for_every_values
    def test_probes_ask_the_admin_port(self, documents):
        for component, pod in pod_templates(documents).items():
            if component == "test":
                continue
            for index, one in enumerate(containers(pod)):
                for probe, service in [("startupProbe", "liveness"), ("livenessProbe", "liveness"),
                                       ("readinessProbe", "readiness")]:
                    port = ports_of(pod)[f"admin-{index}" if index else "admin"]
                    self.assertEqual(one[probe]["grpc"], {"port": port, "service": service}, probe)

    @for_every_values
    def test_volumes_are_there_and_used(self, documents):
        for component, pod in pod_templates(documents).items():
            volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
            self.assertEqual(len(volumes), len(set(volumes)), component)
            everybody = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
            mounts = {mount["name"] for one in everybody for mount in one.get("volumeMounts", [])}
            claimed = set()
            if component.startswith("coordinator"):
                claimed = {claim["metadata"]["name"] for one in by_kind(documents, "StatefulSet").values()
                           for claim in one["spec"].get("volumeClaimTemplates", [])}
            self.assertEqual(set(volumes) | claimed, mounts, component)
            self.assertFalse(set(volumes) & claimed, component)

    @for_every_values
    def test_grace_is_longer_than_the_drain(self, documents):
        for file, settings in settings_of(documents).items():
            drain = settings["drain_timeout"]
            pods = pod_templates(documents)
            component = file.removesuffix(".yaml")
            pod = pods[component if component in pods else component + "-g0"]
            self.assertGreater(pod["spec"]["terminationGracePeriodSeconds"], int(drain.rstrip("s")))


class Sections(unittest.TestCase):
    """What a section of the values adds, and what is not there without it."""

    SMALLEST = {"ConfigMap", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount",
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
                         self.SMALLEST | {"LeaderWorkerSet"})
        embedded = objects(cpu, sets=["worker.controller=embedded"])
        self.assertEqual(self.kinds(embedded), self.SMALLEST)
        self.assertEqual(list(by_kind(embedded, "StatefulSet")), ["tributary-coordinator"])
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

    def test_workers_have_tls_among_themselves_where_they_have_it_to_the_coordinator(self):
        def settings(values, *sets):
            documents = objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS, sets=sets)
            return yaml.safe_load(by_kind(documents, "ConfigMap")["tributary"]["data"]["worker.yaml"])

        # tributary-worker's --peer_tls is auto: TLS where there is a tls_ca.
        self.assertNotIn("peer_tls", settings("gpu"))
        self.assertIn("tls_ca", settings("gpu"))
        self.assertNotIn("tls_ca", settings("cpu"))
        self.assertEqual(settings("gpu", "tls.betweenWorkers=always")["peer_tls"], "always")
        self.assertEqual(settings("gpu", "tls.betweenWorkers=never")["peer_tls"], "never")
        code, text = render(CHART / "ci/cpu-values.yaml", sets=["tls.betweenWorkers=always"])
        self.assertNotEqual(code, 0)
        self.assertIn("tls.betweenWorkers=always needs tls.enabled=true", text)
        code, text = render(CHART / "ci/gpu-values.yaml", apis=OPERATORS, sets=["tls.betweenWorkers=on"])
        self.assertNotEqual(code, 0)
        self.assertIn("betweenWorkers", text)

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
        stateful = by_kind(self.documents, "StatefulSet")["tributary-coordinator"]["spec"]
        self.assertEqual((stateful["replicas"], stateful["updateStrategy"]), (1, {"type": "RollingUpdate"}))
        self.assertIn(stateful["serviceName"], by_kind(self.documents, "Service"))

    def test_the_journal_outlives_the_pod(self):
        settings = settings_of(self.documents)["coordinator.yaml"]
        mounts = {m["name"]: m["mountPath"] for m in container(self.pods["coordinator"])["volumeMounts"]}
        self.assertEqual(mounts["state"], settings["state_dir"])
        claim = by_kind(self.documents, "StatefulSet")["tributary-coordinator"]["spec"]["volumeClaimTemplates"][0]
        self.assertEqual(claim["metadata"]["name"], "state")
        self.assertEqual(claim["spec"]["resources"]["requests"], {"storage": "1Gi"})
        self.assertNotIn("storageClassName", claim["spec"], "the cluster's own")

        def volumes(*sets):
            documents = objects(CHART / "ci/cpu-values.yaml", sets=sets)
            stateful = by_kind(documents, "StatefulSet")["tributary-coordinator"]["spec"]
            of_pod = [v for v in stateful["template"]["spec"]["volumes"] if v["name"] == "state"]
            return documents, of_pod, stateful.get("volumeClaimTemplates", [])

        _, of_pod, templates = volumes("coordinator.state.existingClaim=journal")
        self.assertEqual((of_pod, templates),
                         ([{"name": "state", "persistentVolumeClaim": {"claimName": "journal"}}], []))
        _, of_pod, templates = volumes('coordinator.state.size=""')
        self.assertIn("emptyDir", of_pod[0])
        self.assertEqual(templates, [])
        _, _, templates = volumes("coordinator.state.size=5Gi", "coordinator.state.storageClassName=fast")
        self.assertEqual(templates[0]["spec"]["storageClassName"], "fast")
        for change in ("coordinator.state.enabled=false", "worker.controller=embedded"):
            documents, of_pod, templates = volumes(change)
            self.assertEqual((of_pod, templates), ([], []))
            self.assertNotIn("state_dir", settings_of(documents)["coordinator.yaml"], change)
            self.assertNotIn("/var/lib/tributary", yaml.safe_dump_all(documents), change)

    def test_rank_is_the_pods_index(self):
        env = {e["name"]: e for e in container(self.pods["worker"])["env"]}
        self.assertEqual(env["POD_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"],
                         "metadata.labels['apps.kubernetes.io/pod-index']")
        self.assertIn("--rank=$(POD_INDEX)", container(self.pods["worker"])["args"])

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
        for memory, limit in [("16Gi", 15461882265), ("500M", 450000000), ("1.5Gi", 1449551462),
                              ("2Pi", 2026619832316723), ("17179869184", 15461882265), ("1e9", 900000000)]:
            documents = objects(CHART / "ci/cpu-values.yaml", sets=[f"worker.resources.limits.memory={memory}"])
            self.assertEqual(self.worker_settings(documents)["memory_limit"], limit)
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.settings.memory_limit=1000000"])
        self.assertEqual(self.worker_settings(documents)["memory_limit"], 1000000)
        self.assertNotIn("memory_limit", self.worker_settings(self.documents), "a GPU's memory is not the pod's")

    def test_workers_run_as_many_threads_as_they_have_cpus(self):
        for key, cpus, threads in [("requests", '"6"', 6), ("requests", "2500m", 3), ("limits", '"2"', 2),
                                   ("limits", "2", 2), ("limits", "1.5", 2), ("requests", '".5"', 1)]:
            text = f"tls: {{insecure: true}}\nworker: {{resources: {{{key}: {{cpu: {cpus}}}}}}}\n"
            self.assertEqual(self.worker_settings(objects(text=text))["threads"], threads)

    def test_quantities_are_what_kubernetes_takes(self):
        for one in ("0", "2", "0.5", "100m", "100u", "100n", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti",
                    "1Pi", "1Ei", "1e3", "1E3", "1.5e-1", "+1", '".5"', "5.", '"2"', "12345678901"):
            with self.subTest(one):
                text = f"tls: {{insecure: true}}\nworker: {{shmSize: {one}, resources: {{limits: {{cpu: {one}}}}}}}\n"
                self.assertEqual(validate(objects(text=text), KUBERNETES[-1]), "")
        documents = objects(text="tls: {insecure: true}\nworker: {resources: {limits: {cpu: 2, memory: 1Pi}}}\n")
        limits = container(pod_templates(documents)["worker"])["resources"]["limits"]
        self.assertEqual(limits, {"cpu": 2, "memory": "1Pi"})

    @staticmethod
    def worker_settings(documents):
        return yaml.safe_load(by_kind(documents, "ConfigMap")["tributary"]["data"]["worker.yaml"])

    def test_nobody_but_the_coordinator_gets_its_key(self):
        for component in ("worker", "test"):
            sources = next(v for v in self.pods[component]["spec"]["volumes"] if v["name"] == "identity")
            for source in sources["projected"]["sources"]:
                if source["secret"]["name"] == "tributary-tls":
                    self.assertEqual([item["key"] for item in source["secret"]["items"]], ["ca.crt"])

    def test_evictions_wait_for_what_would_be_lost(self):
        def budgets(*sets, values="cpu"):
            found = by_kind(objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS, sets=sets),
                            "PodDisruptionBudget")
            return {name: one["spec"]["maxUnavailable"] for name, one in found.items()}

        # Workers hand over, and the journal is on a claim: a pod of the group at a time.
        self.assertEqual(budgets(), {"tributary": 1})
        self.assertEqual(budgets(values="groups"), {f"tributary-g{group}": 1 for group in range(4)})
        self.assertEqual(budgets('coordinator.state.size=""'), {"tributary-coordinator": 0, "tributary-worker": 1})
        self.assertEqual(budgets("worker.count=1"), {"tributary-coordinator": 1, "tributary-worker": 0})
        lws = ["worker.controller=lws", "worker.lws.restartPolicy=RecreateGroupOnPodRestart"]
        self.assertEqual(budgets(lws[0]), {"tributary": 1})
        self.assertEqual(budgets(*lws), {"tributary-coordinator": 1, "tributary-worker": 0}, "all would restart with it")
        # Those on GPUs do, too.
        self.assertEqual(budgets(values="gpu"), {"tributary": 1})
        self.assertEqual(budgets(values="node"), {"tributary-coordinator": 0})

    def test_workers_are_replaced_by_an_upgrade_only_where_nothing_is_lost(self):
        def of(*sets, values="cpu"):
            documents = objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS, sets=sets)
            spec = by_kind(documents, "StatefulSet")["tributary-worker"]["spec"]
            drain = settings_of(documents)["worker.yaml"]["drain_timeout"]
            return spec["updateStrategy"]["type"], drain, spec["template"]["spec"]["terminationGracePeriodSeconds"]

        self.assertEqual(of(), ("OnDelete", "180s", 225))
        self.assertEqual(of("coordinator.settings.replicas=1"), ("RollingUpdate", "180s", 225))
        self.assertEqual(of("worker.updateStrategy=RollingUpdate")[0], "RollingUpdate")
        self.assertEqual(of(values="gpu"), ("OnDelete", "180s", 225))
        self.assertEqual(of("coordinator.settings.replicas=1", values="gpu"), ("RollingUpdate", "180s", 225))
        self.assertEqual(of("worker.count=1", "coordinator.settings.replicas=1"), ("OnDelete", "30s", 75))
        pods = pod_templates(objects(CHART / "ci/cpu-values.yaml"))
        self.assertEqual(pods["coordinator"]["spec"]["terminationGracePeriodSeconds"], 75)

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
        text = (CHART / "rules/tributary.yaml").read_text(encoding="utf-8")
        ours = 'namespace="default", job=~"tributary-(coordinator|worker)-metrics"'
        self.assertEqual(rule["spec"], yaml.safe_load(text.replace('job=~"tributary-.*"', ours)))
        for file in (CHART / "dashboards").glob("*.json"):
            dashboard = by_kind(self.documents, "ConfigMap")[f"tributary-dashboard-{file.stem}"]
            self.assertEqual(dashboard["metadata"]["labels"]["grafana_dashboard"], "1")
            self.assertEqual(json.loads(dashboard["data"][file.name]), json.loads(file.read_text(encoding="utf-8")))

    def test_alerts_are_of_this_release_and_lead_to_the_runbook(self):
        documents = objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS,
                            sets=["metrics.prometheusRule.runbook=https://docs.example.com/runbook"])
        spec = by_kind(documents, "PrometheusRule")["tributary"]["spec"]
        services = by_kind(documents, "Service")
        for rule in spec["groups"][0]["rules"]:
            link = f"https://docs.example.com/runbook#{rule['alert'].lower()}"
            self.assertEqual(rule["annotations"]["runbook_url"], link)
            selectors = re.findall(r"\b(?:tributary|process)_\w+\{([^}]*)\}", rule["expr"])
            self.assertTrue(selectors, rule["expr"])
            for selector in selectors:
                self.assertIn('namespace="default"', selector)
                jobs = re.compile(re.search(r'job=~"([^"]*)"', selector)[1])
                self.assertEqual(sorted(name for name in services if jobs.fullmatch(name)),
                                 ["tributary-coordinator-metrics", "tributary-worker-metrics"])
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(spec, file)
            file.flush()
            result = support.run(support.need("promtool"), "check", "rules", file.name)
        self.assertEqual(result.returncode, 0, result.stdout)

    def test_what_can_change_under_a_running_pod_replaces_none(self):
        def pods(*sets):
            documents = objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS, sets=sets)
            return (by_kind(documents, "StatefulSet")["tributary-coordinator"]["spec"]["template"],
                    by_kind(documents, "StatefulSet")["tributary-worker"]["spec"]["template"])

        before = pods()
        program = (support.SOURCE / "service/main.cc").read_text(encoding="utf-8")
        reloadable = set(re.findall(r'\{"(\w+)",', program[program.index("> Reloadable("):program.index("int Serve(")]))
        limits = reloadable - {"log_level", "trace_sample"}
        self.assertGreater(len(limits), 8)
        for change in ("logging.level=debug", "tracing.sample=0.5",
                       *(f"coordinator.settings.{limit}=7" for limit in limits)):
            self.assertEqual(pods(change), before, change)
        for change in ("logging.format=text", "coordinator.settings.batch_max_rows=7"):
            self.assertNotEqual(pods(change)[0], before[0], change)
        self.assertIn("log_level: debug", by_kind(objects(CHART / "ci/gpu-values.yaml", apis=OPERATORS,
                                                          sets=["logging.level=debug"]),
                                                  "ConfigMap")["tributary"]["data"]["worker.yaml"])

    def test_image_and_notes(self):
        self.assertEqual(container(self.pods["worker"])["image"],
                         "registry.example.com/tributary@sha256:" + "0123456789abcdef" * 4)
        cpu = pod_templates(objects(CHART / "ci/cpu-values.yaml"))
        version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
        self.assertEqual(container(cpu["worker"])["image"], f"tributary:{version}-cpu")
        code, notes = render(CHART / "ci/cpu-values.yaml", notes=True)
        self.assertEqual(code, 0, notes)
        self.assertNotIn("Node drains will block", notes)
        self.assertIn("rollout status statefulset/tributary-coordinator", notes)
        _, of_gpus = render(CHART / "ci/gpu-values.yaml", apis=OPERATORS, notes=True)
        self.assertNotIn("Node drains will block", of_gpus)
        self.assertIn("What GPUs of several pods send each other over NCCL is not encrypted", of_gpus)
        self.assertNotIn("is not encrypted", notes, "all is plain text, which is said")
        _, never = render(CHART / "ci/gpu-values.yaml", apis=OPERATORS, sets=["tls.betweenWorkers=never"], notes=True)
        self.assertIn("What workers send each other is not encrypted (tls.betweenWorkers)", never)
        _, without = render(CHART / "ci/cpu-values.yaml", sets=['coordinator.state.size=""'], notes=True)
        self.assertIn("an upgrade that replaces the pod loses all", without)
        self.assertIn("delete pod --grace-period=30 -l", notes)
        code, of_set = render(CHART / "ci/lws-values.yaml", apis=OPERATORS, notes=True)
        self.assertEqual(code, 0, of_set)
        self.assertIn("partition=0", of_set)
        self.assertIn("plain text", notes)


class NodePods(unittest.TestCase):
    """Pods that have several GPUs of a node: the coordinator's, or those of workers."""

    def of(self, values, **options):
        documents = objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS, **options)
        return documents, pod_templates(documents)

    def test_one_node_is_one_pod(self):
        documents, pods = self.of("node")
        self.assertEqual(sorted(pods), ["coordinator", "test"])
        self.assertEqual(set(settings_of(documents)), {"coordinator.yaml"})
        settings = settings_of(documents)["coordinator.yaml"]
        self.assertEqual((settings["embedded_workers"], settings["device"]), (8, "cuda"))
        for of_processes in ("workers", "worker_listen"):
            self.assertNotIn(of_processes, settings)
        self.assertEqual(set(by_kind(documents, "Service")), {"tributary", "tributary-coordinator-metrics"})
        self.assertEqual(set(by_kind(documents, "PodDisruptionBudget")), {"tributary-coordinator"})
        self.assertEqual(set(by_kind(documents, "NetworkPolicy")), {"tributary-coordinator"})

    def test_gpus_of_the_device_plugin_or_of_a_claim(self):
        _, pods = self.of("node")
        spec = pods["coordinator"]["spec"]
        self.assertEqual(spec["resourceClaims"], [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}])
        for one in spec["containers"] + spec["initContainers"]:
            self.assertEqual(one["resources"]["claims"], [{"name": "gpus"}], one["name"])
            self.assertNotIn("nvidia.com/gpu", json.dumps(one["resources"]))
        _, pods = self.of("node", sets=["worker.resourceClaims=[]"])
        limits = {one["name"]: one.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
                  for one in pods["coordinator"]["spec"]["containers"]}
        self.assertEqual(limits, {"coordinator": "8", "host": None})
        self.assertIn({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                      pods["coordinator"]["spec"]["tolerations"])
        self.assertEqual(pods["coordinator"]["spec"]["runtimeClassName"], "nvidia")

    def test_a_host_in_the_pod_shares_what_it_must(self):
        documents, pods = self.of("node")
        spec = pods["coordinator"]["spec"]
        self.assertTrue(spec["shareProcessNamespace"])
        coordinator, host = spec["containers"]
        mounts = [{m["mountPath"]: m["name"] for m in one["volumeMounts"]} for one in (coordinator, host)]
        for path in ("/run/tributary", "/dev/shm", "/run/nvidia-mps"):
            self.assertEqual(mounts[0][path], mounts[1][path])
        self.assertEqual(mounts[1]["/weights"], "weights")
        self.assertNotIn("/etc/tributary/settings", mounts[1])
        shm = next(v for v in spec["volumes"] if v["name"] == "shm")
        self.assertEqual(shm["emptyDir"], {"medium": "Memory", "sizeLimit": "16Gi"})
        listen = settings_of(documents)["coordinator.yaml"]["listen"]
        self.assertEqual(listen, ["0.0.0.0:7400", "unix:/run/tributary/tributary.sock"])
        env = {e["name"]: e.get("value") for e in host["env"]}
        self.assertEqual(env, {"CUDA_MPS_PIPE_DIRECTORY": "/run/nvidia-mps", "MODEL": "large"})
        policy = by_kind(documents, "NetworkPolicy")["tributary-coordinator"]["spec"]
        self.assertIn({"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": "http"}]}, policy["ingress"])
        self.assertEqual(policy["egress"], [])
        documents, _ = self.of("node", sets=["networkPolicy.extraEgress=[{ports: [{protocol: TCP, port: 443}]}]"])
        policy = by_kind(documents, "NetworkPolicy")["tributary-coordinator"]["spec"]
        self.assertEqual(policy["egress"], [{"ports": [{"protocol": "TCP", "port": 443}]}])
        self.assertEqual(validate(documents, KUBERNETES[-1]), "")

    def test_no_namespace_is_shared_unasked(self):
        for values in ("cpu", "gpu", "lws"):
            for pod in self.of(values)[1].values():
                for key in ("shareProcessNamespace", "hostIPC", "hostPID", "hostNetwork"):
                    self.assertNotIn(key, pod["spec"])

    def test_mps_is_there_before_its_clients(self):
        _, pods = self.of("node")
        mps = pods["coordinator"]["spec"]["initContainers"][0]
        self.assertEqual((mps["name"], mps["restartPolicy"]), ("mps", "Always"))
        self.assertIn("startupProbe", mps)
        _, pods = self.of("gpu", sets=["mps.enabled=true", 'mps.activeThreadPercentage="50"'])
        self.assertNotIn("initContainers", pods["coordinator"]["spec"], "it has no GPU")
        self.assertIn({"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "50"}, container(pods["worker"])["env"])

    def test_a_socket_for_hosts_of_the_node(self):
        documents, pods = self.of("cpu", sets=["coordinator.socket.enabled=true",
                                               "coordinator.socket.hostPath=/run/tributary-hosts",
                                               "coordinator.hostIPC=true"])
        spec = pods["coordinator"]["spec"]
        self.assertIn({"name": "run", "hostPath": {"path": "/run/tributary-hosts", "type": "Directory"}},
                      spec["volumes"])
        self.assertTrue(spec["hostIPC"] and spec["hostPID"])
        self.assertNotIn("shareProcessNamespace", spec)
        self.assertNotIn("/dev/shm", [m["mountPath"] for m in container(pods["coordinator"])["volumeMounts"]],
                         "the node's /dev/shm comes with its IPC namespace")
        self.assertNotIn("hostIPC", pods["worker"]["spec"])
        self.assertEqual(validate(documents, KUBERNETES[0]), "")

    def test_ranks_count_over_pods(self):
        documents, pods = self.of("nodes")
        template = by_kind(documents, "LeaderWorkerSet")["tributary-worker"]["spec"]["leaderWorkerTemplate"]
        self.assertEqual(template["size"], 2)
        self.assertEqual(settings_of(documents)["worker.yaml"]["world_size"], 16)
        ranks = pods["worker"]["spec"]["containers"]
        self.assertEqual([one["name"] for one in ranks], ["worker"] + [f"worker-{i}" for i in range(1, 8)])
        for rank, one in enumerate(ranks):
            for word in ("--node=$(POD_INDEX)", "--ranks_per_node=8", f"--rank={rank}"):
                self.assertIn(word, one["args"])
        ports = [port["containerPort"] for one in ranks for port in one["ports"]]
        self.assertEqual(len(ports), len(set(ports)), "they share the pod's network")
        self.assertTrue(pods["worker"]["spec"]["shareProcessNamespace"])

    def test_two_nodes_of_the_device_plugin(self):
        documents, pods = self.of("gpu", sets=["worker.gpusPerPod=4"])
        self.assertEqual(by_kind(documents, "StatefulSet")["tributary-worker"]["spec"]["replicas"], 2)
        limits = [one["resources"]["limits"]["nvidia.com/gpu"] for one in pods["worker"]["spec"]["containers"]]
        self.assertEqual(limits, ["1"] * 4)
        env = {e["name"]: e.get("value") for e in container(pods["worker"])["env"]}
        self.assertEqual(env["NCCL_P2P_DISABLE"], "1", "neighbours' GPUs are hidden")
        for values in ("gpu", "nodes"):
            env = {e["name"] for e in container(self.of(values)[1]["worker"])["env"]}
            self.assertNotIn("NCCL_P2P_DISABLE", env, values)
        for name, monitor in by_kind(documents, "ServiceMonitor").items():
            ports = [one["port"] for one in monitor["spec"]["endpoints"]]
            expected = ["metrics", "metrics-1", "metrics-2", "metrics-3"] if name.endswith("worker") else ["metrics"]
            self.assertEqual(ports, expected)
        self.assertEqual(validate(documents, KUBERNETES[0]), "")

    def test_nccl_takes_for_one_host_what_shares_memory(self):
        def host_ids(*sets):
            env = {e["name"]: e for e in container(self.of("gpu", sets=sets)[1]["worker"])["env"]}
            return env["NCCL_HOSTID"]["valueFrom"]["fieldRef"]["fieldPath"]
        self.assertEqual(host_ids(), "metadata.uid")
        self.assertEqual(host_ids("worker.hostNetwork=true"), "metadata.uid")
        self.assertEqual(host_ids("worker.hostNetwork=true", "worker.hostIPC=true"), "spec.nodeName")
        own = "[{name: NCCL_HOSTID, value: mine}]"
        _, pods = self.of("gpu", sets=[f"worker.extraEnv={own}"])
        self.assertEqual([e for e in container(pods["worker"])["env"] if e["name"] == "NCCL_HOSTID"],
                         [{"name": "NCCL_HOSTID", "value": "mine"}])

    def test_embedded_cpu_workers_stay_within_their_container(self):
        documents, _ = self.of("cpu", sets=["worker.controller=embedded", "coordinator.resources.limits.memory=8Gi"])
        settings = settings_of(documents)["coordinator.yaml"]
        self.assertEqual((settings["threads"], settings["memory_limit"]), (2, 7730941132))


class Placement(unittest.TestCase):
    """Where pods go, and how they are reached there."""

    def worker(self, values, *sets):
        return pod_templates(objects(CHART / f"ci/{values}-values.yaml", apis=OPERATORS, sets=sets))["worker"]["spec"]

    def test_pods_spread_over_nodes(self):
        term = self.worker("cpu")["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]
        pods = pod_templates(objects(CHART / "ci/cpu-values.yaml"))
        selector = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        self.assertTrue(matches(selector, pods["worker"]))
        self.assertFalse(matches(selector, pods["coordinator"]))
        required = self.worker("cpu", "worker.spread=required")["affinity"]["podAntiAffinity"]
        self.assertEqual(list(required), ["requiredDuringSchedulingIgnoredDuringExecution"])
        self.assertNotIn("affinity", self.worker("cpu", "worker.spread=none"))
        both = self.worker("cpu", "worker.affinity={nodeAffinity: {}}")["affinity"]
        self.assertEqual(set(both), {"nodeAffinity", "podAntiAffinity"})

    def test_the_nodes_network(self):
        spec = self.worker("nodes")
        self.assertTrue(spec["hostNetwork"])
        self.assertEqual(spec["dnsPolicy"], "ClusterFirstWithHostNet")
        self.assertEqual(self.worker("cpu", "worker.dnsPolicy=None", "worker.dnsConfig={nameservers: [10.0.0.1]}")
                         ["dnsPolicy"], "None")
        policies = by_kind(objects(CHART / "ci/nodes-values.yaml", apis=OPERATORS), "NetworkPolicy")
        registration = [rule for rule in policies["tributary-coordinator"]["spec"]["ingress"]
                        if {"protocol": "TCP", "port": "registration"} in rule["ports"]]
        self.assertNotIn("from", registration[0], "no selector finds pods of the nodes' network")

    def test_address_families(self):
        documents = objects(CHART / "ci/nodes-values.yaml", apis=OPERATORS)
        for service in by_kind(documents, "Service").values():
            self.assertEqual(service["spec"]["ipFamilies"], ["IPv6", "IPv4"])
            self.assertEqual(service["spec"]["ipFamilyPolicy"], "RequireDualStack")
        settings = settings_of(documents)
        self.assertEqual(settings["coordinator.yaml"]["listen"], "[::]:7400")
        self.assertNotIn("0.0.0.0", json.dumps(documents))
        for service in by_kind(objects(CHART / "ci/cpu-values.yaml"), "Service").values():
            self.assertNotIn("ipFamilies", service["spec"])

    def test_groups_take_a_topology_for_themselves(self):
        lws = by_kind(objects(CHART / "ci/nodes-values.yaml", apis=OPERATORS), "LeaderWorkerSet")["tributary-worker"]
        self.assertEqual(lws["metadata"]["annotations"],
                         {"leaderworkerset.sigs.k8s.io/exclusive-topology": "example.com/rack"})
        self.assertEqual(lws["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"], 1)
        self.assertEqual(lws["spec"]["networkConfig"], {"subdomainPolicy": "Shared"})


class Groups(unittest.TestCase):
    """Several groups of one release."""

    def setUp(self):
        self.documents = objects(CHART / "ci/groups-values.yaml", apis=OPERATORS)

    def test_each_has_objects_of_its_own(self):
        for kind, name in (("StatefulSet", "tributary-g%d-coordinator"), ("StatefulSet", "tributary-g%d-worker"),
                           ("ConfigMap", "tributary-g%d"), ("NetworkPolicy", "tributary-g%d-worker"),
                           ("PodDisruptionBudget", "tributary-g%d"), ("Service", "tributary-g%d-registration")):
            found = by_kind(self.documents, kind)
            for group in range(4):
                self.assertIn(name % group, found)
        names = [(d["kind"], d["metadata"]["name"]) for d in self.documents]
        self.assertEqual(len(names), len(set(names)))

    def test_workers_register_with_their_own_coordinator(self):
        for group in range(4):
            settings = yaml.safe_load(by_kind(self.documents, "ConfigMap")[f"tributary-g{group}"]["data"]["worker.yaml"])
            self.assertEqual(settings["coordinator"], f"tributary-g{group}-registration:7402")
            pods = pod_templates(self.documents)
            for component in ("coordinator", "worker"):
                volumes = {v["name"]: v for v in pods[f"{component}-g{group}"]["spec"]["volumes"]}
                self.assertEqual(volumes["settings"]["configMap"]["name"], f"tributary-g{group}")

    def test_hosts_find_all_by_one_name_and_each_by_its_own(self):
        services = by_kind(self.documents, "Service")
        whole = services["tributary"]["spec"]
        self.assertEqual(whole["clusterIP"], "None")
        self.assertNotIn("publishNotReadyAddresses", whole)
        self.assertNotIn("tributary/group", whole["selector"])
        for group in range(4):
            self.assertEqual(services[f"tributary-g{group}"]["spec"]["selector"]["tributary/group"], str(group))
        _, notes = render(CHART / "ci/groups-values.yaml", apis=OPERATORS, notes=True)
        self.assertIn("groups:tributary.", notes)

    def test_the_test_checks_every_group(self):
        targets = [word for one in pod_templates(self.documents)["test"]["spec"]["containers"] for word in one["args"]
                   if word.startswith("--target=")]
        self.assertEqual(targets, [f"--target=tributary-g{group}:7400" for group in range(4)])

    def test_each_has_a_journal_of_its_own(self):
        for group in range(4):
            volumes = pod_templates(self.documents)[f"coordinator-g{group}"]["spec"]["volumes"]
            claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
            self.assertEqual(claims, [f"journal-g{group}"])

    def test_one_group_keeps_the_names_it_had(self):
        names = [d["metadata"]["name"] for d in objects(CHART / "ci/cpu-values.yaml")]
        self.assertFalse([name for name in names if "-g0" in name])

    def test_they_do_not_share_a_socket(self):
        code, text = render(text="tls: {insecure: true}\ngroups: 2\n"
                                 "coordinator: {socket: {enabled: true, hostPath: /run/t}}\n")
        self.assertNotEqual(code, 0)
        self.assertIn("a release for each group", text)


class Scaling(unittest.TestCase):
    """Groups of one pod, whose number an autoscaler decides."""

    HPA = ["worker.controller=embedded", "autoscaling.enabled=true", "autoscaling.targetRatio=0.57"]

    def test_the_autoscaler_scales_what_is_there(self):
        hpa = objects(CHART / "ci/cpu-values.yaml", sets=self.HPA)
        keda = objects(CHART / "ci/scaled-values.yaml", apis=OPERATORS)
        self.assertEqual(validate(hpa, KUBERNETES[0]), "")
        for documents, kind in ((hpa, "HorizontalPodAutoscaler"), (keda, "ScaledObject")):
            target = by_kind(documents, kind)["tributary"]["spec"]["scaleTargetRef"]
            self.assertEqual(target, {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "tributary-coordinator"})
            stateful = by_kind(documents, "StatefulSet")[target["name"]]["spec"]
            self.assertNotIn("replicas", stateful, "an upgrade would set it back")

    def test_it_goes_by_how_full_caches_are_and_never_removes_a_group(self):
        hpa = by_kind(objects(CHART / "ci/cpu-values.yaml", sets=self.HPA), "HorizontalPodAutoscaler")["tributary"]
        keda = by_kind(objects(CHART / "ci/scaled-values.yaml", apis=OPERATORS), "ScaledObject")["tributary"]["spec"]
        pods = hpa["spec"]["metrics"][0]["pods"]
        self.assertEqual(pods["target"], {"type": "AverageValue", "averageValue": "570m"})
        trigger = keda["triggers"][0]
        self.assertEqual((trigger["metricType"], trigger["metadata"]["threshold"]), ("AverageValue", "0.7"))
        query = trigger["metadata"]["query"]
        known = metrics_doc.documented()
        self.assertEqual(metrics_doc.problems(query.replace('namespace="default", ', ""), known), [])
        self.assertIn(pods["metric"]["name"], known)
        self.assertIn('namespace="default", job="tributary-coordinator-metrics"', query)
        self.assertIn("tributary-coordinator-metrics",
                      by_kind(objects(CHART / "ci/scaled-values.yaml", apis=OPERATORS), "Service"))
        for behavior in (hpa["spec"]["behavior"], keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]):
            self.assertEqual(behavior["scaleDown"], {"selectPolicy": "Disabled"})
            self.assertEqual(behavior["scaleUp"]["policies"], [{"type": "Pods", "value": 1, "periodSeconds": 300}])
        self.assertEqual((keda["minReplicaCount"], keda["maxReplicaCount"]), (2, 6))

    def test_hosts_find_every_group_by_the_releases_name(self):
        documents = objects(CHART / "ci/scaled-values.yaml", apis=OPERATORS)
        service = by_kind(documents, "Service")["tributary"]["spec"]
        self.assertEqual(service["clusterIP"], "None")
        self.assertEqual(by_kind(documents, "StatefulSet")["tributary-coordinator"]["spec"]["serviceName"], "tributary")
        _, notes = render(CHART / "ci/scaled-values.yaml", apis=OPERATORS, notes=True)
        self.assertIn("groups:tributary.", notes)
        targets = [word for one in pod_templates(documents)["test"]["spec"]["containers"] for word in one["args"]
                   if word.startswith("--target=")]
        self.assertEqual(targets, [f"--target=tributary-coordinator-{group}.tributary:7400" for group in range(2)])


class Collector(unittest.TestCase):
    """Spans and metrics to an OpenTelemetry collector."""

    def test_both_programs_send_there_and_policies_let_them(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=[
            "otlp.endpoint='https://otel.monitoring:4318'", "otlp.headersSecret=h", "otlp.caSecret=c",
            "networkPolicy.collector=[{namespaceSelector: {}}]"])
        self.assertEqual(validate(documents, KUBERNETES[0]), "")
        for file, settings in settings_of(documents).items():
            self.assertEqual(settings["otlp_endpoint"], "https://otel.monitoring:4318", file)
            self.assertEqual(settings["otlp_headers_file"], "/etc/tributary/otlp/headers")
            self.assertEqual(settings["otlp_ca"], "/etc/tributary/otlp/ca.crt")
        for component in ("coordinator", "worker"):
            pod = pod_templates(documents)[component]
            self.assertIn({"name": "otlp", "mountPath": "/etc/tributary/otlp", "readOnly": True},
                          container(pod)["volumeMounts"])
            egress = by_kind(documents, "NetworkPolicy")[f"tributary-{component}"]["spec"]["egress"]
            self.assertIn({"ports": [{"protocol": "TCP", "port": 4318}], "to": [{"namespaceSelector": {}}]}, egress)
            self.assertIn({"protocol": "UDP", "port": 53}, [port for rule in egress for port in rule["ports"]])

    def test_the_port_may_go_unsaid(self):
        for endpoint, port in (("http://c", 80), ("https://c/", 443), ("http://[fd00::1]:99", 99), ("https://[::2]", 443)):
            documents = objects(CHART / "ci/cpu-values.yaml", sets=[f"otlp.endpoint='{endpoint}'"])
            egress = by_kind(documents, "NetworkPolicy")["tributary-coordinator"]["spec"]["egress"]
            self.assertEqual(egress[0], {"ports": [{"protocol": "TCP", "port": port}]}, endpoint)

    def test_without_one_nothing_is_there(self):
        text = yaml.safe_dump_all(objects(CHART / "ci/cpu-values.yaml"))
        self.assertNotIn("otlp", text)


# Values that are refused, and what the refusal says.
OK = "tls: {insecure: true}\n"
TLS = "tls: {enabled: true, existingSecret: s, %s}\n"
SCALED = OK + "autoscaling: {enabled: true}\n%s\n"
REFUSALS = [
    # Values against each other (templates/validations.yaml).
    ("", "Set tls.enabled=true and tls.existingSecret, or tls.insecure=true"),
    ("tls: {enabled: true}\n", "tls.existingSecret is empty: set it to a Secret"),
    (TLS % "insecure: true", "tls.enabled and tls.insecure contradict"),
    ("tls: {insecure: true, clientAuth: true, workerSecret: s}\n", "tls.clientAuth needs tls.enabled=true"),
    (TLS % "clientAuth: true", "tls.workerSecret is empty"),
    (TLS % "clientNames: [a]", "count only with tls.clientAuth=true"),
    (TLS % "clientAuth: false" + "auth: {tokenSecret: s}\n",
     "set auth.workerTokenSecret, or tls.clientAuth=true"),
    (TLS % "clientAuth: true, workerSecret: s, clientNames: [a]", "so workers must show who they are"),
    (TLS % "clientAuth: true, workerSecret: s, workerNames: [a]", "set tls.clientNames, or auth.tokenSecret"),
    (TLS % "clientAuth: false" + "auth: {testTokenSecret: s}\n", "set auth.tokenSecret, which lists them"),
    (TLS % "testSecret: s", "tls.testSecret counts only with tls.clientAuth=true"),
    (OK + "auth: {workerTokenSecret: s}\n", "auth: tokens are not sent in plain text"),
    (OK + "coordinator: {replicas: 2}\n", "coordinator.replicas must be 1"),
    (OK + "worker: {gpusPerPod: 3, backend: gpu}\n", "set it to a multiple of worker.gpusPerPod (3)"),
    (OK + "worker: {gpusPerPod: 2, controller: embedded}\n", "worker.controller=embedded has none: leave it at 1"),
    (OK + "worker: {controller: embedded, settings: {threads: 2}}\n", "use coordinator.settings"),
    (OK + "worker: {controller: embedded, hostIPC: true}\n", "set coordinator.hostIPC"),
    (OK + "worker: {count: 64, gpusPerPod: 64}\ngrpc: {adminPort: 9440}\n", "set them further apart"),
    (OK + "worker: {resourceClaims: [{name: a}]}\n", "set worker.backend=gpu"),
    (OK + "worker: {resourceClaims: [{source: a}]}\n", "name is required"),
    (OK + "mps: {enabled: true}\n", "mps.enabled is for GPUs"),
    (OK + "coordinator: {socket: {hostPath: /run/a}}\n", "only with coordinator.socket.enabled=true"),
    (OK + "coordinator: {socket: {enabled: true, hostPath: run/a}}\n", "hostPath: Does not match pattern"),
    (OK + "coordinator: {socket: {enabled: true, hostPath: /run/a}, hostContainers: [{name: a, image: b}]}\n",
     "Set one of them"),
    (OK + "coordinator: {hostContainers: [{name: coordinator, image: b}]}\n",
     "coordinator is the name of a container of the chart"),
    (OK + "coordinator: {hostContainers: [{name: a}]}\n", "image is required"),
    (OK + "worker: {spread: far}\n", "worker.spread must be one of"),
    (OK + "worker: {dnsPolicy: None_}\n", "worker.dnsPolicy must be one of"),
    (OK + "network: {ipFamilies: [IPv5]}\n", "network.ipFamilies.0 must be one of"),
    (OK + "worker: {lws: {rolloutStrategy: {rollingUpdateConfiguration: {maxUnavailable: 0}}}, controller: lws}\n",
     "no upgrade could begin"),
    (OK + "worker: {settings: {node: 1}}\n", "worker.settings.node is set by the chart"),
    (OK + 'worker: {resources: {limits: {nvidia.com/gpu: "1"}}}\n', "set worker.backend=gpu"),
    (OK + "terminationGracePeriodSeconds: 60\n", "set it above timeouts.drainSeconds + timeouts.stepSeconds (60)"),
    (OK + "grpc: {adminPort: 7400}\n", "must differ, are 7400, 7400, 7402, 9464"),
    (OK + "coordinator: {settings: {listen: x}}\n", "coordinator.settings.listen is set by the chart"),
    (TLS % "clientAuth: false" + "coordinator: {settings: {insecure: true}}\n",
     "coordinator.settings.insecure is set by the chart"),
    (OK + "coordinator: {settings: {drain_timeout: 300s}}\n",
     "coordinator.settings.drain_timeout is set by the chart"),
    (OK + "worker: {settings: {rank: 1}}\n", "worker.settings.rank is set by the chart"),
    (OK + "worker: {settings: {token_file: x}}\n", "worker.settings.token_file is set by the chart"),
    (OK + "metrics: {enabled: false, serviceMonitor: {enabled: true}}\n", "needs metrics.enabled=true"),
    (OK + "metrics: {enabled: false, prometheusRule: {enabled: true}}\n",
     "metrics.prometheusRule.enabled needs metrics.enabled=true"),
    (OK + "metrics: {serviceMonitor: {enabled: true}}\n", "networkPolicy.prometheus is empty"),
    (OK + "metrics: {serviceMonitor: {enabled: true}}\n", "the cluster has no ServiceMonitor"),
    (OK + "metrics: {prometheusRule: {enabled: true}}\n", "the cluster has no PrometheusRule"),
    (OK + "worker: {controller: lws}\n", "--api-versions leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"),
    # One value by itself (values.schema.json).
    (OK + "workers: {count: 4}\n", "Additional property workers is not allowed"),
    (OK + "worker: {conut: 4}\n", "worker: Additional property conut is not allowed"),
    (OK + "worker: {count: 0}\n", "worker.count: Must be greater than or equal to 1"),
    (OK + 'worker: {count: "4"}\n', "worker.count: Invalid type. Expected: integer, given: string"),
    (OK + "worker: {backend: rocm}\n", "worker.backend: worker.backend must be one of"),
    (OK + "worker: {shmSize: 1 GB}\n", "worker.shmSize: Does not match pattern"),
    (OK + "worker: {resources: {limits: {cpu: true}}}\n", "worker.resources.limits.cpu: Invalid type"),
    (OK + "worker: {resources: {limits: {cpu: -1}}}\n", "limits.cpu: Must be greater than or equal to 0"),
    (OK + "worker: {resources: {limits: {memory: 16gi}}}\n", "worker.resources.limits.memory: Does not match pattern"),
    (OK + "image: {tag: latest}\n", "image.tag: Must not validate the schema (not)"),
    (OK + "image: {digest: abc}\n", "image.digest: Does not match pattern"),
    (OK + "grpc: {port: 80}\n", "grpc.port: Must be greater than or equal to 1024"),
    (OK + "grpc: {maxMessageBytes: 4294967296}\n", "grpc.maxMessageBytes: Must be less than or equal to"),
    (OK + "tracing: {sample: 2}\n", "tracing.sample: Must be less than or equal to 1"),
    (OK + "tracing: {otlp: x}\n", "tracing: Additional property otlp is not allowed"),
    (OK + "otlp: {endpoint: 'collector:4317'}\n", "otlp.endpoint: Does not match pattern"),
    (OK + "otlp: {endpoint: 'http://c:4318', headersSecret: s}\n", "would be sent in plain text"),
    (OK + "otlp: {endpoint: 'http://c:4318', caSecret: s}\n", "otlp.caSecret is of no use"),
    (OK + "coordinator: {settings: {otlp_endpoint: x}}\n", "coordinator.settings.otlp_endpoint is set by the chart"),
    (OK + "coordinator: {state: {size: big}}\n", "coordinator.state.size"),
    (SCALED % "worker: {count: 2}", "autoscaling.enabled needs worker.controller=embedded"),
    (SCALED % "groups: 2", "leave groups at 1"),
    (OK + "autoscaling: {enabled: true, minGroups: 5}\n", "autoscaling.minGroups (5) exceeds"),
    (SCALED % "metrics: {enabled: false}", "autoscaling.enabled needs metrics.enabled=true"),
    (SCALED % "coordinator: {socket: {enabled: true, hostPath: /run/t}}", "the groups of a node would share one socket"),
    (SCALED % "coordinator: {state: {existingClaim: a}}", "keep no journal"),
    (OK + "autoscaling: {enabled: true, by: keda}\n", "autoscaling.prometheus is empty"),
    (OK + "autoscaling: {enabled: true, by: keda, prometheus: 'http://p:9090'}\n", "the cluster has no ScaledObject"),
    (OK + "autoscaling: {enabled: true, targetRatio: 1.5}\n", "autoscaling.targetRatio"),
    (OK + "networkPolicy: {clients: {a: b}}\n", "networkPolicy.clients: Invalid type"),
    (OK + "podDisruptionBudget: {minAvailable: 1}\n", "podDisruptionBudget: Additional property minAvailable"),
    (OK + "metrics: {serviceMonitor: {interval: often}}\n", "serviceMonitor.interval: Does not match pattern"),
    (OK + "worker: {lws: {restartPolicy: Always}}\n", "worker.lws.restartPolicy must be one of"),
    (OK + "logging: {level: verbose}\n", "logging.level: logging.level must be one of"),
    (OK + "coordinator: {settings: {--listen: x}}\n", 'Property name of "--listen" does not match'),
]


class Refused(unittest.TestCase):
    """Wrong values, and the message that says what to set."""

    def test_each_for_its_reason(self):
        for values, reason in REFUSALS:
            with self.subTest(values):
                code, said = render(text=values)
                self.assertEqual(code, 1, said)
                self.assertIn(reason, said)

    def test_several_reasons_at_once(self):
        code, said = render(text="coordinator: {replicas: 2}\nworker: {gpusPerPod: 3}\n")
        self.assertEqual(code, 1)
        for reason in ("tls:", "coordinator.replicas", "worker.count"):
            self.assertIn(f"- {reason}", said)

    def test_old_kubernetes(self):
        code, said = render(CI_VALUES[0], kubernetes="1.27.9")
        self.assertEqual(code, 1)
        self.assertIn("chart requires kubeVersion: >=1.28-0", said)
        code, said = render(CHART / "ci/node-values.yaml", apis=OPERATORS, kubernetes="1.28.0")
        self.assertEqual(code, 1)
        for reason in ("mps.enabled needs Kubernetes 1.29", "the cluster (v1.28.0) has no ResourceClaim"):
            self.assertIn(reason, said)
        code, said = render(CHART / "ci/nodes-values.yaml", kubernetes="1.33.0",
                            apis=[*OPERATORS, "resource.k8s.io/v1beta2/ResourceClaim"])
        self.assertEqual(code, 0, said)

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

    def start_of(self, name, pod, one, index, topology, maps):
        """The command of a pod's container, with its mounted files laid out in a folder of its own. What is mounted
        empty, containers of a pod share."""
        root = self.folder / name
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        volumes.setdefault("state", {"name": "state"})  # which a set claims
        empty = {}
        for mount in one.get("volumeMounts", []):
            if mount["mountPath"].startswith(("/run/", "/var/lib/")):
                empty[mount["mountPath"]] = str(self.folder / f"pod-{index}{mount['mountPath']}")
                os.makedirs(empty[mount["mountPath"]], exist_ok=True)
        for mount in one.get("volumeMounts", []):
            place = root / mount["mountPath"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            for file, text in self.files_of(volumes[mount["name"]], maps).items():
                text = topology.translate(name, text).replace("/etc/tributary/", f"{root}/etc/tributary/")
                for path, shared in empty.items():
                    text = text.replace(path, shared)
                # A name that became an address in brackets, which YAML takes for a list.
                text = re.sub(r"(?m)^(\w+: )(\[::1\]:\d+)$", r"\1'\2'", text)
                (place / file).write_text(text, encoding="utf-8")
        variables = {"$(POD_IP)": topology.loopback.strip("[]"), "$(POD_INDEX)": str(index)}
        words = [re.sub(r"\$\(\w+\)", lambda m: variables[m[0]], word) for word in one["args"]]
        for path, place in {**empty, "/etc/tributary": f"{root}/etc/tributary"}.items():
            words = [word.replace(path + "/", place + "/") for word in words]
        return words

    def serve(self, documents, secrets, loopback="127.0.0.1"):
        """Starts the release, runs the pod of `helm test` and hosts of the coordinator's pod, and ends it."""
        pods = pod_templates(documents)
        maps = secrets | {name: one["data"] for name, one in by_kind(documents, "ConfigMap").items()}
        started = [("coordinator", pods["coordinator"], container(pods["coordinator"]), 0)]
        workers = by_kind(documents, "StatefulSet").get("tributary-worker")
        replicas = workers["spec"]["replicas"] if workers else 0
        started += [(f"worker-{index}-{one['name']}", pods["worker"], one, index)
                    for index in range(replicas) for one in containers(pods["worker"])]
        hosts = [("host", pods["coordinator"], one, 0) for one in pods["coordinator"]["spec"]["containers"]
                 if one["name"] == "host"]
        asked = [("test", pods["test"], container(pods["test"]), 0), *hosts]
        topology = Topology({name: {} for name, *_ in [*started, *asked]},
                            {"tributary": "coordinator", "tributary-registration": "coordinator"}, loopback)
        self.addCleanup(topology.kill)
        for name, pod, one, index in started:
            admin = f"--admin=localhost:{one['readinessProbe']['grpc']['port']}"
            topology.services[name] = {
                "command": self.start_of(name, pod, one, index, topology, maps),
                "healthcheck": {"test": ["CMD", "tributary", "health", admin]},
                "stop_grace_period": f"{pod['spec']['terminationGracePeriodSeconds']}s"}
        checks = [self.start_of(*each, topology, maps) for each in asked]
        for name, *_ in asked:
            del topology.services[name]
        topology.start_in_order()
        topology.wait_until_healthy(60)
        ranks = max(1, len(started) - 1)
        for check in checks:
            result = support.run(*topology.local("coordinator", check))
            logs = "\n".join(process.output() for process in topology.processes.values())
            self.assertEqual(result.returncode, 0, f"{result.stdout}\n{logs}")
            expected = settings_of(documents)["coordinator.yaml"].get("embedded_workers", ranks)
            self.assertIn(f"{expected} ranks", result.stdout)
        for name in topology.services:
            with urllib.request.urlopen(f"http://{loopback}:{self.metrics_port(topology, name)}/metrics") as page:
                self.assertIn("tributary_build_info{", page.read().decode(), name)
        self.assertEqual(topology.stop(), {name: 0 for name, *_ in started})
        return topology

    @staticmethod
    def metrics_port(topology, name):
        """The one that a command names, or else its settings."""
        words = " ".join(topology.services[name]["command"])
        if named := re.search(r"--metrics_port=(\d+)", words):
            return topology.port(name, named[1])
        return topology.port(name, 9464)

    def test_the_smallest(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.count=2", 'worker.resources.requests.cpu="1"'])
        self.serve(documents, {})

    HOST = "[{name: host, image: a, args: [tributary, check, '--target=unix:/run/tributary/tributary.sock']}]"

    def test_one_pod_with_a_host_in_it(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.controller=embedded", "worker.count=3",
                                                                f"coordinator.hostContainers={self.HOST}"])
        self.serve(documents, {})

    def test_several_ranks_in_each_pod(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.count=4", "worker.gpusPerPod=2",
                                                                'worker.resources.requests.cpu="1"'])
        topology = self.serve(documents, {})
        self.assertEqual(len(topology.services), 5)

    @unittest.skipUnless(support.ISOLATED in os.environ, "needs a network of its own")
    def test_over_ipv6_alone(self):
        documents = objects(CHART / "ci/cpu-values.yaml", sets=["worker.count=2", "network.ipFamilies=[IPv6]",
                                                                'worker.resources.requests.cpu="1"'])
        self.serve(documents, {}, loopback="[::1]")

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
        self.serve(documents, secrets)


if __name__ == "__main__":
    support.main(isolated=True)
