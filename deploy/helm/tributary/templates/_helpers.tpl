{{- define "tributary.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 52: room for "-worker" and an ordinal within the 63 characters of a label. */}}
{{- define "tributary.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "tributary.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tributary.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Names that several templates use. */}}
{{- define "tributary.coordinatorName" -}}{{ include "tributary.fullname" . }}-coordinator{{- end -}}
{{- define "tributary.workerName" -}}{{ include "tributary.fullname" . }}-worker{{- end -}}
{{- define "tributary.registrationName" -}}{{ include "tributary.fullname" . }}-registration{{- end -}}

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

{{/* Selectors never change between versions of the chart. Call with (list . "worker"). */}}
{{- define "tributary.selectorLabels" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: {{ include "tributary.name" $top }}
app.kubernetes.io/instance: {{ $top.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "tributary.labels" -}}
{{- $top := index . 0 -}}
{{ include "tributary.selectorLabels" . }}
app.kubernetes.io/version: {{ $top.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tributary
app.kubernetes.io/managed-by: {{ $top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $top.Chart.Name $top.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A probe of the admin server. Call with (list . "readiness"). */}}
{{- define "tributary.probe" -}}
grpc:
  port: {{ (index . 0).Values.grpc.adminPort | int }}
  service: {{ index . 1 }}
timeoutSeconds: 3
{{- end -}}

{{/* What both kinds of pods say alike. Call with (list . .Values.worker). */}}
{{- define "tributary.podCommon" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
serviceAccountName: {{ include "tributary.serviceAccountName" $top }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $top.Values.terminationGracePeriodSeconds | int }}
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
{{- with $role.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Files that a program reads: its settings, certificates and tokens. Call with (list . .Values.worker). */}}
{{- define "tributary.volumes" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
- name: settings
  configMap:
    name: {{ include "tributary.fullname" $top }}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $role.shmSize }}}
{{- with $role.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tributary.volumeMounts" -}}
{{- $role := index . 1 -}}
- {name: settings, mountPath: /etc/tributary/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
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

{{/* The pod of a worker: of the StatefulSet, and of the LeaderWorkerSet. */}}
{{- define "tributary.workerPodTemplate" -}}
metadata:
  labels:
    {{- include "tributary.labels" (list . "worker") | nindent 4 }}
    {{- with .Values.worker.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include "tributary.workerSettings" . | sha256sum }}
    {{- with .Values.worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "tributary.podCommon" (list . .Values.worker) | nindent 2 }}
  {{- with .Values.worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- $tolerations := .Values.worker.tolerations }}
  {{- if eq .Values.worker.backend "gpu" }}
  {{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "tributary.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - tributary-worker
        - --config=/etc/tributary/settings/worker.yaml
        - --host=$(POD_IP)
        - --rank=$(RANK)
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        # The place in the group: the StatefulSet's ordinal, or the LeaderWorkerSet's index.
        - name: RANK
          valueFrom:
            fieldRef:
              {{- if eq .Values.worker.controller "lws" }}
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
              {{- else }}
              fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
              {{- end }}
        {{- $named := dict }}
        {{- range .Values.worker.extraEnv }}{{ $_ := set $named .name true }}{{ end }}
        {{- if and (eq .Values.worker.backend "gpu") (not (hasKey $named "NCCL_SOCKET_IFNAME")) }}
        # The pod's own interface; NCCL would otherwise try others it finds.
        - {name: NCCL_SOCKET_IFNAME, value: eth0}
        {{- end }}
        {{- with .Values.worker.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: admin, containerPort: {{ .Values.grpc.adminPort | int }}}
        {{- if .Values.metrics.enabled }}
        - {name: metrics, containerPort: {{ .Values.metrics.port | int }}}
        {{- end }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      # Covers allocation and the start of the GPU; liveness says nothing about other workers, so that the restart of
      # one does not spread.
      startupProbe:
        {{- include "tributary.probe" (list . "liveness") | nindent 8 }}
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe:
        {{- include "tributary.probe" (list . "liveness") | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 6
      readinessProbe:
        {{- include "tributary.probe" (list . "readiness") | nindent 8 }}
        periodSeconds: 5
      {{- $resources := deepCopy .Values.worker.resources }}
      {{- if eq .Values.worker.backend "gpu" }}
      {{- $gpus := dict "nvidia.com/gpu" (.Values.worker.gpusPerPod | int | toString) }}
      {{- $limits := merge $gpus (default dict (get $resources "limits")) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "tributary.volumeMounts" (list . .Values.worker) | nindent 8 }}
        {{- if include "tributary.workerHasIdentity" . }}
        - {name: identity, mountPath: /etc/tributary/identity, readOnly: true}
        {{- end }}
  volumes:
    {{- include "tributary.volumes" (list . .Values.worker) | nindent 4 }}
    {{- if include "tributary.workerHasIdentity" . }}
    {{- include "tributary.identityVolume" (list . .Values.tls.workerSecret .Values.auth.workerTokenSecret) | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Settings files: flag names of the programs. What a user sets by name wins. */}}
{{- define "tributary.coordinatorSettings" -}}
{{- $settings := dict
  "listen" (printf "0.0.0.0:%d" (.Values.grpc.port | int))
  "admin_listen" (printf "0.0.0.0:%d" (.Values.grpc.adminPort | int))
  "worker_listen" (printf "0.0.0.0:%d" (.Values.grpc.workerPort | int))
  "workers" (.Values.worker.count | int)
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
{{- toYaml (mergeOverwrite $settings .Values.coordinator.settings) -}}
{{- end -}}

{{/* A quantity such as 16Gi in bytes. */}}
{{- define "tributary.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
                   "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := get $units (regexFind "[A-Za-z]*$" .) -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) ($unit | float64) | int64 -}}
{{- end -}}

{{/* A quantity of CPUs, such as 4 or 500m, in whole ones. */}}
{{- define "tributary.cpus" -}}
{{- $number := regexFind "^[0-9.]+" . | float64 -}}
{{- ceil (ternary (divf $number 1000) $number (hasSuffix "m" .)) | int -}}
{{- end -}}

{{- define "tributary.workerSettings" -}}
{{- $settings := dict
  "coordinator" (printf "%s:%d" (include "tributary.registrationName" .) (.Values.grpc.workerPort | int))
  "admin_listen" (printf "0.0.0.0:%d" (.Values.grpc.adminPort | int))
  "world_size" (.Values.worker.count | int)
  "drain_timeout" (printf "%ds" (.Values.timeouts.drainSeconds | int))
  "log_level" .Values.logging.level
  "log_format" .Values.logging.format
-}}
{{- if eq .Values.worker.backend "gpu" }}{{ $_ := set $settings "device" "cuda" }}{{ end -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $settings "metrics_port" (.Values.metrics.port | int) }}{{ end -}}
{{- /* A worker that took the machine's memory for its own would be killed instead of refusing a cache. */ -}}
{{- $memory := dig "limits" "memory" "" .Values.worker.resources -}}
{{- if and $memory (eq .Values.worker.backend "cpu") -}}
{{- $_ := set $settings "memory_limit" (mulf (include "tributary.bytes" $memory) 0.9 | int64) -}}
{{- end -}}
{{- /* By itself a worker would start a thread for every core of the node. */ -}}
{{- $cpus := dig "limits" "cpu" (dig "requests" "cpu" "" .Values.worker.resources) .Values.worker.resources -}}
{{- if and $cpus (eq .Values.worker.backend "cpu") -}}
{{- $_ := set $settings "threads" (include "tributary.cpus" $cpus | int) -}}
{{- end -}}
{{- if .Values.tls.enabled }}{{ $_ := set $settings "coordinator_ca" "/etc/tributary/identity/ca.crt" }}{{ end -}}
{{- if .Values.tls.workerSecret }}
{{- $_ := set $settings "tls_cert" "/etc/tributary/identity/tls.crt" }}
{{- $_ := set $settings "tls_key" "/etc/tributary/identity/tls.key" }}
{{- end -}}
{{- if .Values.auth.workerTokenSecret }}{{ $_ := set $settings "token_file" "/etc/tributary/identity/token" }}{{ end -}}
{{- toYaml (mergeOverwrite $settings .Values.worker.settings) -}}
{{- end -}}
