{{- define "tributary.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 52: room for "-worker" and an ordinal within the 63 characters of a label; 48 with the number of a group. */}}
{{- define "tributary.fullname" -}}
{{- $room := ternary 48 52 (gt (.Values.groups | int) 1) -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc $room | trimSuffix "-" -}}
{{- else if contains (include "tributary.name" .) .Release.Name -}}
{{- .Release.Name | trunc $room | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tributary.name" .) | trunc $room | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* "yes" when the release has several groups. Their objects are rendered one group after the other, with the group's
     number as .Group; objects of the whole release, and those of a single group, have none. */}}
{{- define "tributary.hasGroups" -}}{{ if gt (.Values.groups | int) 1 }}yes{{ end }}{{- end -}}

{{/* "yes" when hosts find several groups by the release's name: its service then has an address for each. */}}
{{- define "tributary.byGroups" -}}
{{- if or (include "tributary.hasGroups" .) .Values.autoscaling.enabled }}yes{{ end -}}
{{- end -}}

{{/* Names that several templates use, of one group. */}}
{{- define "tributary.groupName" -}}
{{ include "tributary.fullname" . }}{{ if hasKey . "Group" }}-g{{ .Group }}{{ end }}
{{- end -}}
{{- define "tributary.coordinatorName" -}}{{ include "tributary.groupName" . }}-coordinator{{- end -}}
{{- define "tributary.workerName" -}}{{ include "tributary.groupName" . }}-worker{{- end -}}
{{- define "tributary.registrationName" -}}{{ include "tributary.groupName" . }}-registration{{- end -}}

{{- define "tributary.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tributary.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tributary.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- $suffix := ternary "cuda" "cpu" (eq .Values.worker.backend "gpu") -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s-%s" .Chart.AppVersion $suffix) .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Selectors never change between versions of the chart. Within a group they select its own pods, otherwise those of
     all groups. Call with (list . "worker"). */}}
{{- define "tributary.selectorLabels" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: {{ include "tributary.name" $top }}
app.kubernetes.io/instance: {{ $top.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if and (hasKey $top "Group") (has (index . 1) (list "coordinator" "worker")) }}
tributary/group: {{ $top.Group | quote }}
{{- end }}
{{- end -}}

{{- define "tributary.labels" -}}
{{- $top := index . 0 -}}
{{ include "tributary.selectorLabels" . }}
app.kubernetes.io/version: {{ $top.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tributary
app.kubernetes.io/managed-by: {{ $top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $top.Chart.Name $top.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A probe of an admin server. Call with (list PORT "readiness"). */}}
{{- define "tributary.probe" -}}
grpc:
  port: {{ index . 0 | int }}
  service: {{ index . 1 }}
timeoutSeconds: 3
{{- end -}}

{{/* Where the workers are: "yes" when they are threads of the coordinator. */}}
{{- define "tributary.embedded" -}}{{ if eq .Values.worker.controller "embedded" }}yes{{ end }}{{- end -}}

{{/* "yes" when the pods of a component have GPUs. Call with (list . "worker"). */}}
{{- define "tributary.hasGpus" -}}
{{- $top := index . 0 -}}
{{- $owner := ternary "coordinator" "worker" (eq (include "tributary.embedded" $top) "yes") -}}
{{- if and (eq $top.Values.worker.backend "gpu") (eq (index . 1) $owner) }}yes{{ end -}}
{{- end -}}

{{/* "yes" when hosts of the pod or the node find a Unix socket. */}}
{{- define "tributary.hasSocket" -}}
{{- if or .Values.coordinator.socket.enabled .Values.coordinator.hostContainers }}yes{{ end -}}
{{- end -}}

{{/* "yes" when the coordinator keeps a journal. */}}
{{- define "tributary.hasState" -}}
{{- if and .Values.coordinator.state.enabled (not (include "tributary.embedded" .)) }}yes{{ end -}}
{{- end -}}

{{/* Where the journal lies: "existing" (a claim that the user names), "template" (a claim that the StatefulSet makes), or
     nothing: in a folder of the pod, with which it ends. */}}
{{- define "tributary.stateClaim" -}}
{{- if include "tributary.hasState" . -}}
{{- if .Values.coordinator.state.existingClaim }}existing{{ else if .Values.coordinator.state.size }}template{{ end -}}
{{- end -}}
{{- end -}}

{{/* "yes" when a worker that is told to stop can hand its tokens to another one: there is one, which does not restart with
     it. */}}
{{- define "tributary.handsOver" -}}
{{- $alone := or (ne .Values.worker.controller "lws") (eq .Values.worker.lws.restartPolicy "None") -}}
{{- if and $alone (not (include "tributary.embedded" .)) (gt (include "tributary.workerPods" . | int) 1) }}yes{{ end -}}
{{- end -}}

{{/* How an upgrade replaces workers. One after the other only where that loses nothing even while the coordinator is
     being replaced, too: where each one's tokens are kept by another one. */}}
{{- define "tributary.updateStrategy" -}}
{{- $replicas := get .Values.coordinator.settings "replicas" | default 0 | int -}}
{{- $rolls := and (eq (include "tributary.handsOver" .) "yes") (ge $replicas 1) -}}
{{- default (ternary "RollingUpdate" "OnDelete" $rolls) .Values.worker.updateStrategy -}}
{{- end -}}

{{/* Seconds that a worker may take to end: for calls in flight, and for handing over its tokens. */}}
{{- define "tributary.workerDrainSeconds" -}}
{{- if include "tributary.handsOver" . -}}
{{ max (.Values.timeouts.drainSeconds | int) (.Values.timeouts.handOverSeconds | int) }}
{{- else -}}
{{ .Values.timeouts.drainSeconds | int }}
{{- end -}}
{{- end -}}

{{/* How a program says "every address of mine". */}}
{{- define "tributary.anyAddress" -}}
{{- if eq (first .Values.network.ipFamilies | default "") "IPv6" }}[::]{{ else }}0.0.0.0{{ end -}}
{{- end -}}

{{/* Address families of a service, where values say so. */}}
{{- define "tributary.ipFamilies" -}}
{{- with .Values.network.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.network.ipFamilies }}
ipFamilies: [{{ join ", " . }}]
{{- end }}
{{- end -}}

{{/* What a container asks for: its resources, and its GPUs by claim or by number.
     Call with (list . RESOURCES GPUS), GPUS 0 for none. */}}
{{- define "tributary.resources" -}}
{{- $top := index . 0 -}}
{{- $resources := deepCopy (index . 1) -}}
{{- if and (index . 2) $top.Values.worker.resourceClaims -}}
{{- $_ := set $resources "claims" (include "tributary.claims" $top | fromYaml).claims -}}
{{- else if index . 2 -}}
{{- $gpus := dict "nvidia.com/gpu" (index . 2 | int | toString) -}}
{{- $_ := set $resources "limits" (merge $gpus (default dict (get $resources "limits"))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "tributary.claims" -}}
claims:
  {{- range .Values.worker.resourceClaims }}
  - name: {{ .name }}
  {{- end }}
{{- end -}}

{{/* Variables of whatever computes on GPUs. Those that a user gives win. Call with (list . .Values.worker). */}}
{{- define "tributary.gpuEnv" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
{{- $named := dict -}}
{{- range $role.extraEnv }}{{ $_ := set $named .name true }}{{ end -}}
{{- if not (hasKey $named "NCCL_HOSTID") }}
# What NCCL takes for one host: what shares memory and abstract sockets. By itself it goes by the host's name, which
# pods on the node's network have in common though they may share no memory.
- name: NCCL_HOSTID
  valueFrom: {fieldRef: {fieldPath: {{ ternary "spec.nodeName" "metadata.uid" (and $role.hostIPC $role.hostNetwork) }}}}
{{- end }}
{{- if not (or $role.hostNetwork (hasKey $named "NCCL_SOCKET_IFNAME")) }}
# The pod's own interface; NCCL would otherwise try others it finds.
- {name: NCCL_SOCKET_IFNAME, value: eth0}
{{- end }}
{{- if and (gt (get $role "gpusPerPod" | default 1 | int) 1) (not $top.Values.worker.resourceClaims) (not (hasKey $named "NCCL_P2P_DISABLE")) }}
# Of the device plugin's GPUs a container has its own only. NCCL would take its neighbours' for reachable, since the pod is
# one host, and fail: it is to go over the pod's /dev/shm.
- {name: NCCL_P2P_DISABLE, value: "1"}
{{- end }}
{{- if $top.Values.mps.enabled }}
{{ include "tributary.mpsEnv" $top }}
{{- end }}
{{- end -}}

{{- define "tributary.mpsEnv" -}}
- {name: CUDA_MPS_PIPE_DIRECTORY, value: /run/nvidia-mps}
{{- with .Values.mps.activeThreadPercentage }}
- {name: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Init containers: the user's, and MPS, which is one that goes on running, so that it is there before its clients. Call
     with (list . .Values.worker "worker" GPUS). */}}
{{- define "tributary.initContainers" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
{{- with $role.initContainers }}
{{ toYaml . }}
{{- end }}
{{- if and $top.Values.mps.enabled (include "tributary.hasGpus" (list $top (index . 2))) }}
- name: mps
  image: {{ include "tributary.image" $top }}
  imagePullPolicy: {{ $top.Values.image.pullPolicy }}
  restartPolicy: Always
  # The container toolkit brings the program with the driver.
  command: [nvidia-cuda-mps-control, -f]
  env:
    {{- include "tributary.mpsEnv" $top | nindent 4 }}
    - {name: CUDA_MPS_LOG_DIRECTORY, value: /run/nvidia-mps}
    {{- if not $top.Values.worker.resourceClaims }}
    # The device plugin gives a GPU to one container only. This one asks the container toolkit, which may refuse.
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    {{- end }}
  securityContext:
    {{- toYaml $top.Values.securityContext | nindent 4 }}
  startupProbe:
    exec: {command: [test, -e, /run/nvidia-mps/control]}
    periodSeconds: 1
    failureThreshold: 60
  resources:
    {{- $claims := ternary 1 0 (not (empty $top.Values.worker.resourceClaims)) }}
    {{- include "tributary.resources" (list $top $top.Values.mps.resources $claims) | nindent 4 }}
  volumeMounts:
    - {name: mps, mountPath: /run/nvidia-mps}
    - {name: tmp, mountPath: /tmp}
    {{- if not $role.hostIPC }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Where pods go: apart, by `spread`, with what the user says on top. Call with (list . .Values.worker "worker"). */}}
{{- define "tributary.affinity" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
{{- $affinity := dict -}}
{{- $spread := get $role "spread" | default "none" -}}
{{- if ne $spread "none" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector"
     (dict "matchLabels" (include "tributary.selectorLabels" (list $top (index . 2)) | fromYaml)) -}}
{{- if eq $spread "required" -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- else -}}
{{- $weighted := dict "weight" 100 "podAffinityTerm" $term -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $weighted)) -}}
{{- end -}}
{{- end -}}
{{- $merged := mergeOverwrite $affinity $role.affinity -}}
{{- if $merged }}{{ toYaml $merged }}{{ end -}}
{{- end -}}

{{/* What both kinds of pods say alike. Call with (list . .Values.worker "worker"). */}}
{{- define "tributary.podCommon" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
{{- $component := index . 2 -}}
{{- $gpus := include "tributary.hasGpus" (list $top $component) -}}
serviceAccountName: {{ include "tributary.serviceAccountName" $top }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- /* A worker's drain may be longer than the coordinator's, for which the value stands. */}}
{{- $longer := ternary (sub (include "tributary.workerDrainSeconds" $top | int) ($top.Values.timeouts.drainSeconds | int)) 0 (eq $component "worker") }}
terminationGracePeriodSeconds: {{ add ($top.Values.terminationGracePeriodSeconds | int) $longer }}
securityContext:
  {{- toYaml $top.Values.podSecurityContext | nindent 2 }}
{{- with $top.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "tributary.affinity" . }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- if $gpus }}
{{- with $top.Values.worker.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $top.Values.worker.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if $role.hostIPC }}
hostIPC: true
hostPID: true
{{- else if or (get $role "hostContainers") (gt (get $role "gpusPerPod" | default 1 | int) 1) }}
# CUDA hands memory from process to process only where they see each other.
shareProcessNamespace: true
{{- end }}
{{- if $role.hostNetwork }}
hostNetwork: true
{{- end }}
{{- if or $role.dnsPolicy $role.hostNetwork }}
dnsPolicy: {{ $role.dnsPolicy | default "ClusterFirstWithHostNet" }}
{{- end }}
{{- with $role.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := $role.tolerations }}
{{- if $gpus }}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "tributary.initContainers" . | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
{{- with $role.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Files that a program reads: its settings, certificates and tokens. Call with (list . .Values.worker "worker"). */}}
{{- define "tributary.volumes" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
- name: settings
  configMap:
    name: {{ include "tributary.groupName" $top }}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if not $role.hostIPC }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $role.shmSize }}}
{{- end }}
{{- if and $top.Values.mps.enabled (include "tributary.hasGpus" (list $top (index . 2))) }}
- name: mps
  emptyDir: {sizeLimit: 64Mi}
{{- end }}
{{- if include "tributary.hasOtlpFiles" $top }}
- name: otlp
  projected:
    defaultMode: 0440
    sources:
      {{- with $top.Values.otlp.headersSecret }}
      - secret: {name: {{ . }}, items: [{key: headers, path: headers}]}
      {{- end }}
      {{- with $top.Values.otlp.caSecret }}
      - secret: {name: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
      {{- end }}
{{- end }}
{{- with $role.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tributary.volumeMounts" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
- {name: settings, mountPath: /etc/tributary/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if not $role.hostIPC }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if and $top.Values.mps.enabled (include "tributary.hasGpus" (list $top (index . 2))) }}
- {name: mps, mountPath: /run/nvidia-mps}
{{- end }}
{{- if include "tributary.hasOtlpFiles" $top }}
- {name: otlp, mountPath: /etc/tributary/otlp, readOnly: true}
{{- end }}
{{- with $role.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Certificates and tokens of those who connect: workers, and the pod of `helm test`. No keys but their own.
     Call with (list . CERTIFICATE_SECRET TOKEN_SECRET). */}}
{{- define "tributary.identityVolume" -}}
{{- $top := index . 0 -}}
- name: identity
  projected:
    defaultMode: 0440
    sources:
      {{- if $top.Values.tls.enabled }}
      - secret: {name: {{ $top.Values.tls.existingSecret }}, items: [{key: ca.crt, path: ca.crt}]}
      {{- end }}
      {{- with index . 1 }}
      - secret: {name: {{ . }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
      {{- end }}
      {{- with index . 2 }}
      - secret: {name: {{ . }}, items: [{key: token, path: token}]}
      {{- end }}
{{- end -}}

{{/* What the pod of `helm test` shows besides a token. */}}
{{- define "tributary.testSecret" -}}{{ default .Values.tls.workerSecret .Values.tls.testSecret }}{{- end -}}

{{- define "tributary.workerHasIdentity" -}}
{{- if or .Values.tls.enabled .Values.auth.workerTokenSecret }}yes{{ end -}}
{{- end -}}

{{/* What hosts of the coordinator's pod get besides their own: the socket, /dev/shm, the GPUs, MPS. */}}
{{- define "tributary.hostContainers" -}}
{{- $top := . -}}
{{- $gpus := include "tributary.hasGpus" (list . "coordinator") -}}
{{- $mounts := list (dict "name" "run" "mountPath" "/run/tributary") -}}
{{- if not .Values.coordinator.hostIPC }}
{{- $mounts = append $mounts (dict "name" "shm" "mountPath" "/dev/shm") }}
{{- end -}}
{{- $env := list -}}
{{- if and .Values.mps.enabled $gpus -}}
{{- $mounts = append $mounts (dict "name" "mps" "mountPath" "/run/nvidia-mps") -}}
{{- $env = include "tributary.mpsEnv" . | fromYamlArray -}}
{{- end -}}
{{- $containers := list -}}
{{- range .Values.coordinator.hostContainers -}}
{{- $one := deepCopy . -}}
{{- $_ := set $one "volumeMounts" (concat $mounts (get $one "volumeMounts" | default list)) -}}
{{- with concat $env (get $one "env" | default list) }}{{ $_ := set $one "env" . }}{{ end -}}
{{- if not (hasKey $one "securityContext") }}{{ $_ := set $one "securityContext" $top.Values.securityContext }}{{ end -}}
{{- $resources := deepCopy (get $one "resources" | default dict) -}}
{{- if and $gpus $top.Values.worker.resourceClaims (not (hasKey $resources "claims")) -}}
{{- $_ := set $resources "claims" (include "tributary.claims" $top | fromYaml).claims -}}
{{- end -}}
{{- $_ := set $one "resources" $resources -}}
{{- $containers = append $containers $one -}}
{{- end -}}
{{- toYaml $containers -}}
{{- end -}}

{{/* The port of a rank of a pod: they share its network. Call with (list FIRST_PORT RANK). */}}
{{- define "tributary.portOf" -}}{{ add (index . 0 | int) (index . 1 | int) }}{{- end -}}
{{- define "tributary.portName" -}}{{ index . 0 }}{{ if index . 1 }}-{{ index . 1 }}{{ end }}{{- end -}}

{{/* One rank of a pod as a container. Call with (list . RANK), the rank within the pod. */}}
{{- define "tributary.workerContainer" -}}
{{- $top := index . 0 -}}
{{- $rank := index . 1 | int -}}
{{- $worker := $top.Values.worker -}}
{{- $perPod := $worker.gpusPerPod | int -}}
{{- $admin := include "tributary.portOf" (list $top.Values.grpc.adminPort $rank) | int -}}
{{- $metrics := include "tributary.portOf" (list $top.Values.metrics.port $rank) | int -}}
- name: {{ include "tributary.portName" (list "worker" $rank) }}
  image: {{ include "tributary.image" $top }}
  imagePullPolicy: {{ $top.Values.image.pullPolicy }}
  args:
    - tributary-worker
    - --config=/etc/tributary/settings/worker.yaml
    - --host=$(POD_IP)
    {{- if gt $perPod 1 }}
    - --node=$(POD_INDEX)
    - --ranks_per_node={{ $perPod }}
    - --rank={{ $rank }}
    {{- if $rank }}
    - --admin_listen={{ include "tributary.anyAddress" $top }}:{{ $admin }}
    {{- if $top.Values.metrics.enabled }}
    - --metrics_port={{ $metrics }}
    {{- end }}
    {{- end }}
    {{- else }}
    - --rank=$(POD_INDEX)
    {{- end }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    # The pod's place in the group: the StatefulSet's ordinal, or the LeaderWorkerSet's index.
    - name: POD_INDEX
      valueFrom:
        fieldRef:
          {{- if eq $worker.controller "lws" }}
          fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
          {{- else }}
          fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
          {{- end }}
    {{- if eq $worker.backend "gpu" }}
    {{- include "tributary.gpuEnv" (list $top $worker) | trim | nindent 4 }}
    {{- end }}
    {{- with $worker.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: {{ include "tributary.portName" (list "admin" $rank) }}, containerPort: {{ $admin }}}
    {{- if $top.Values.metrics.enabled }}
    - {name: {{ include "tributary.portName" (list "metrics" $rank) }}, containerPort: {{ $metrics }}}
    {{- end }}
  securityContext:
    {{- toYaml $top.Values.securityContext | nindent 4 }}
  # Covers allocation and the start of the GPU; liveness says nothing about other workers, so that the restart of
  # one does not spread.
  startupProbe:
    {{- include "tributary.probe" (list $admin "liveness") | nindent 4 }}
    periodSeconds: 5
    failureThreshold: 60
  livenessProbe:
    {{- include "tributary.probe" (list $admin "liveness") | nindent 4 }}
    periodSeconds: 10
    failureThreshold: 6
  readinessProbe:
    {{- include "tributary.probe" (list $admin "readiness") | nindent 4 }}
    periodSeconds: 5
  resources:
    {{- $gpus := ternary 1 0 (eq $worker.backend "gpu") }}
    {{- include "tributary.resources" (list $top $worker.resources $gpus) | nindent 4 }}
  volumeMounts:
    {{- include "tributary.volumeMounts" (list $top $worker "worker") | nindent 4 }}
    {{- if include "tributary.workerHasIdentity" $top }}
    - {name: identity, mountPath: /etc/tributary/identity, readOnly: true}
    {{- end }}
{{- end -}}

{{/* How many pods the workers are. */}}
{{- define "tributary.workerPods" -}}{{ div (.Values.worker.count | int) (.Values.worker.gpusPerPod | int) }}{{- end -}}

{{/* The pod of a worker, or of the workers of a node: of the StatefulSet, and of the LeaderWorkerSet. */}}
{{- define "tributary.workerPodTemplate" -}}
{{- $top := . -}}
metadata:
  labels:
    {{- include "tributary.labels" (list . "worker") | nindent 4 }}
    {{- with .Values.worker.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include "tributary.settingsOfTheStart" (include "tributary.workerSettings" .) | sha256sum }}
    {{- with .Values.worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "tributary.podCommon" (list . .Values.worker "worker") | nindent 2 }}
  containers:
    {{- range $rank := until (.Values.worker.gpusPerPod | int) }}
    {{- include "tributary.workerContainer" (list $top $rank) | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "tributary.volumes" (list . .Values.worker "worker") | nindent 4 }}
    {{- if include "tributary.workerHasIdentity" . }}
    {{- include "tributary.identityVolume" (list . .Values.tls.workerSecret .Values.auth.workerTokenSecret) | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Settings that a program reads at its start only. The others change under a running pod: Kubernetes renews the file and
     the program looks at it. Call with a settings file. */}}
{{- define "tributary.settingsOfTheStart" -}}
{{- omit (fromYaml .) "log_level" "trace_sample" "max_calls_per_client" "max_streams_per_client" "max_bytes_per_client"
     "max_bytes_in_flight" "max_sequences_per_client" "max_pages_per_client" "max_caches_per_client" "max_cache_bytes_per_client"
     "max_sessions_per_client" "max_mailbox_bytes_per_client" | toYaml -}}
{{- end -}}

{{/* Settings with which a program sends spans and metrics to a collector: a mapping. */}}
{{- define "tributary.otlpSettings" -}}
{{- $settings := dict -}}
{{- if .Values.otlp.endpoint -}}
{{- $_ := set $settings "otlp_endpoint" .Values.otlp.endpoint -}}
{{- $_ := set $settings "otlp_interval" (printf "%ds" (.Values.otlp.intervalSeconds | int)) -}}
{{- if .Values.otlp.headersSecret }}{{ $_ := set $settings "otlp_headers_file" "/etc/tributary/otlp/headers" }}{{ end -}}
{{- if .Values.otlp.caSecret }}{{ $_ := set $settings "otlp_ca" "/etc/tributary/otlp/ca.crt" }}{{ end -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{- define "tributary.hasOtlpFiles" -}}
{{- if and .Values.otlp.endpoint (or .Values.otlp.headersSecret .Values.otlp.caSecret) }}yes{{ end -}}
{{- end -}}

{{/* What a NetworkPolicy must let out for it, names of services included. */}}
{{- define "tributary.otlpEgress" -}}
{{- if .Values.otlp.endpoint -}}
{{- $port := regexFind ":[0-9]+" (regexReplaceAll "^https?://(\\[[^]]*\\])?" .Values.otlp.endpoint "") | trimPrefix ":" -}}
{{- $port = default (ternary "443" "80" (hasPrefix "https:" .Values.otlp.endpoint)) $port -}}
- ports:
    - {protocol: TCP, port: {{ $port }}}
  {{- with .Values.networkPolicy.collector }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}
{{- end -}}

{{/* Settings files: flag names of the programs. What a user sets by name wins. */}}
{{- define "tributary.coordinatorSettings" -}}
{{- $any := include "tributary.anyAddress" . -}}
{{- $listen := printf "%s:%d" $any (.Values.grpc.port | int) -}}
{{- if include "tributary.hasSocket" . }}
{{- $listen = list $listen "unix:/run/tributary/tributary.sock" }}
{{- end -}}
{{- $settings := dict
  "listen" $listen
  "admin_listen" (printf "%s:%d" $any (.Values.grpc.adminPort | int))
  "max_message_bytes" (.Values.grpc.maxMessageBytes | int64)
  "reflection" .Values.grpc.reflection
  "step_timeout" (printf "%ds" (.Values.timeouts.stepSeconds | int))
  "form_timeout" (printf "%ds" (.Values.timeouts.formSeconds | int))
  "drain_timeout" (printf "%ds" (.Values.timeouts.drainSeconds | int))
  "log_level" .Values.logging.level
  "log_format" .Values.logging.format
  "trace_sample" .Values.tracing.sample
  "trace_spans" (.Values.tracing.spans | int)
-}}
{{- if include "tributary.embedded" . -}}
{{- $_ := set $settings "embedded_workers" (.Values.worker.count | int) -}}
{{- $_ := mergeOverwrite $settings (include "tributary.cpuShare" (list . .Values.coordinator.resources "memory_limit") | fromYaml) -}}
{{- else -}}
{{- $_ := set $settings "workers" (.Values.worker.count | int) -}}
{{- $_ := set $settings "worker_listen" (printf "%s:%d" $any (.Values.grpc.workerPort | int)) -}}
{{- if .Values.coordinator.state.enabled }}{{ $_ := set $settings "state_dir" "/var/lib/tributary" }}{{ end -}}
{{- end -}}
{{- if eq .Values.worker.backend "gpu" }}{{ $_ := set $settings "device" "cuda" }}{{ end -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $settings "metrics_port" (.Values.metrics.port | int) }}{{ end -}}
{{- if .Values.tls.insecure }}{{ $_ := set $settings "insecure" true }}{{ end -}}
{{- if .Values.tls.enabled }}
{{- $_ := set $settings "tls_cert" "/etc/tributary/tls/tls.crt" }}
{{- $_ := set $settings "tls_key" "/etc/tributary/tls/tls.key" }}
{{- end -}}
{{- if .Values.tls.clientAuth }}{{ $_ := set $settings "tls_client_ca" "/etc/tributary/tls/ca.crt" }}{{ end -}}
{{- range $flag, $names := dict "client_san" .Values.tls.clientNames "worker_san" .Values.tls.workerNames
                                "admin_san" .Values.tls.adminNames -}}
{{- if $names }}{{ $_ := set $settings $flag $names }}{{ end -}}
{{- end -}}
{{- if .Values.auth.tokenSecret }}{{ $_ := set $settings "token_file" "/etc/tributary/auth/tokens" }}{{ end -}}
{{- $_ := mergeOverwrite $settings (include "tributary.otlpSettings" . | fromYaml) -}}
{{- toYaml (mergeOverwrite $settings .Values.coordinator.settings) -}}
{{- end -}}

{{/* A quantity as a plain number: 16Gi, 500m, 1e3 or, as YAML reads one without a unit, a number. */}}
{{- define "tributary.amount" -}}
{{- $units := dict "" 1 "n" 0.000000001 "u" 0.000001 "m" 0.001
                   "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
                   "P" 1000000000000000 "E" 1000000000000000000
                   "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776
                   "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $text := toString . -}}
{{- $unit := get $units (regexFind "[A-Za-z]*$" $text) -}}
{{- mulf (regexFind "^[+]?[0-9.]+([eE][+-]?[0-9]+)?" $text | float64) ($unit | float64) -}}
{{- end -}}

{{/* A quantity in bytes. */}}
{{- define "tributary.bytes" -}}
{{- include "tributary.amount" . | float64 | int64 -}}
{{- end -}}

{{/* A quantity of CPUs in whole ones. */}}
{{- define "tributary.cpus" -}}
{{- include "tributary.amount" . | float64 | ceil | int -}}
{{- end -}}

{{/* What CPU workers may take of their container: a mapping of settings. Call with (list . RESOURCES MEMORY_FLAG). */}}
{{- define "tributary.cpuShare" -}}
{{- $resources := index . 1 -}}
{{- $settings := dict -}}
{{- /* A worker that took the machine's memory for its own would be killed instead of refusing a cache. */ -}}
{{- $memory := dig "limits" "memory" "" $resources -}}
{{- if and $memory (eq (index . 0).Values.worker.backend "cpu") -}}
{{- $_ := set $settings (index . 2) (mulf (include "tributary.bytes" $memory) 0.9 | int64) -}}
{{- end -}}
{{- /* By itself a worker would start a thread for every core of the node. */ -}}
{{- $cpus := dig "limits" "cpu" (dig "requests" "cpu" "" $resources) $resources -}}
{{- if and $cpus (eq (index . 0).Values.worker.backend "cpu") -}}
{{- $_ := set $settings "threads" (include "tributary.cpus" $cpus | int) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{- define "tributary.workerSettings" -}}
{{- $settings := dict
  "coordinator" (printf "%s:%d" (include "tributary.registrationName" .) (.Values.grpc.workerPort | int))
  "admin_listen" (printf "%s:%d" (include "tributary.anyAddress" .) (.Values.grpc.adminPort | int))
  "world_size" (.Values.worker.count | int)
  "drain_timeout" (printf "%ss" (include "tributary.workerDrainSeconds" .))
  "log_level" .Values.logging.level
  "log_format" .Values.logging.format
-}}
{{- if eq .Values.worker.backend "gpu" }}{{ $_ := set $settings "device" "cuda" }}{{ end -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $settings "metrics_port" (.Values.metrics.port | int) }}{{ end -}}
{{- $_ := mergeOverwrite $settings (include "tributary.cpuShare" (list . .Values.worker.resources "memory_limit") | fromYaml) -}}
{{- if .Values.tls.enabled }}{{ $_ := set $settings "tls_ca" "/etc/tributary/identity/ca.crt" }}{{ end -}}
{{- if ne .Values.tls.betweenWorkers "auto" }}{{ $_ := set $settings "peer_tls" .Values.tls.betweenWorkers }}{{ end -}}
{{- if .Values.tls.workerSecret }}
{{- $_ := set $settings "tls_cert" "/etc/tributary/identity/tls.crt" }}
{{- $_ := set $settings "tls_key" "/etc/tributary/identity/tls.key" }}
{{- end -}}
{{- if .Values.auth.workerTokenSecret }}{{ $_ := set $settings "token_file" "/etc/tributary/identity/token" }}{{ end -}}
{{- $_ := mergeOverwrite $settings (include "tributary.otlpSettings" . | fromYaml) -}}
{{- toYaml (mergeOverwrite $settings .Values.worker.settings) -}}
{{- end -}}

{{/* How an autoscaler may act: one group at a time, and never one less, since the tokens of a group end with it. */}}
{{- define "tributary.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .Values.autoscaling.secondsPerGroup | int }}
  policies: [{type: Pods, value: 1, periodSeconds: {{ .Values.autoscaling.secondsPerGroup | int }}}]
scaleDown: {selectPolicy: Disabled}
{{- end -}}
