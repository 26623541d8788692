{{- define "gpushare.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* What the names of the objects begin with. A Service, the one of admission, takes no dot and begins with a letter. */}}
{{- define "gpushare.fullname" -}}
{{- $name := .Values.fullnameOverride }}
{{- if not $name }}
{{- $name = .Release.Name }}
{{- if not (contains (include "gpushare.name" .) $name) }}
{{- $name = printf "%s-%s" $name (include "gpushare.name" .) }}
{{- end }}
{{- end }}
{{- $name = $name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- if regexMatch "^[0-9]" $name }}
{{- fail (printf "the objects' names would begin with %s, and a Service's name has to begin with a letter: set fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "gpushare.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "gpushare.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gpushare
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels by which a part's pods are selected; takes (list $ "part"). They never change. */}}
{{- define "gpushare.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "gpushare.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Metadata of a part's object; takes (list $ "part"). */}}
{{- define "gpushare.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "gpushare.fullname" $root }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "gpushare.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The same for cluster-scoped objects, whose names carry the namespace's release so that two releases are refused early. */}}
{{- define "gpushare.clusterMetadata" -}}
{{- $root := index . 0 -}}
name: {{ include "gpushare.fullname" $root }}-{{ index . 1 }}
labels:
  {{- include "gpushare.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The image; a tag that names an older release is refused, as its parts lack ports and options of this chart. */}}
{{- define "gpushare.image" -}}
{{- $release := regexFind "^v?(0|[1-9][0-9]*)[.](0|[1-9][0-9]*)[.](0|[1-9][0-9]*)$" (toString .Values.image.tag) }}
{{- if and $release (not .Values.image.digest) (semverCompare (printf "<%s" .Chart.AppVersion) $release) }}
{{- fail (printf "image.tag %s is of a release before this chart's, %s: leave it empty, or install the chart of that release" $release .Chart.AppVersion) }}
{{- end }}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* kube-scheduler of the cluster's own version with its pre-release (-rc.1), without a vendor's suffix (-gke.100, -eks-1a2b3c). */}}
{{- define "gpushare.schedulerImage" -}}
{{ .Values.scheduler.image.repository }}:{{ .Values.scheduler.image.tag | default (regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+(-(alpha|beta|rc)\\.[0-9]+)?" .Capabilities.KubeVersion.Version) }}
{{- end }}

{{- define "gpushare.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Username by which the API server knows a part; takes (list $ "part"). */}}
{{- define "gpushare.username" -}}
{{- $root := index . 0 -}}
system:serviceaccount:{{ $root.Release.Namespace }}:{{ include "gpushare.fullname" $root }}-{{ index . 1 }}
{{- end }}

{{/* Pod and container security of the parts that need nothing of the node. */}}
{{- define "gpushare.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "gpushare.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Environment of every part. */}}
{{- define "gpushare.env" -}}
- name: GPUSHARE_LOG_LEVEL
  value: {{ .Values.logging.level | quote }}
{{- include "gpushare.tokenEnv" . }}
{{- end }}

{{/* The token that a scrape has to bring, mounted into every part. */}}
{{- define "gpushare.tokenEnv" -}}
{{- if .Values.metrics.tokenSecret }}
- name: GPUSHARE_METRICS_TOKEN_FILE
  value: /metrics-token/token
{{- end }}
{{- end }}
{{- define "gpushare.tokenMount" -}}
{{- if .Values.metrics.tokenSecret }}
- {name: metrics-token, mountPath: /metrics-token, readOnly: true}
{{- end }}
{{- end }}
{{- define "gpushare.tokenVolume" -}}
{{- with .Values.metrics.tokenSecret }}
- name: metrics-token
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: {{ $.Values.metrics.tokenKey | quote }}, path: token}]
{{- end }}
{{- end }}

{{/* Interference models of the cluster's own GPUs, mounted where pods are placed, learnt of and watched. */}}
{{- define "gpushare.modelsEnv" -}}
{{- if .Values.models }}
- name: GPUSHARE_MODELS
  value: /models
{{- end }}
{{- end }}
{{- define "gpushare.modelsMount" -}}
{{- if .Values.models }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- define "gpushare.modelsVolume" -}}
{{- if .Values.models }}
- name: models
  configMap: {name: {{ include "gpushare.fullname" . }}-models}
{{- end }}
{{- end }}
{{- define "gpushare.modelsChecksum" -}}
{{- with .Values.models }}
checksum/models: {{ toJson . | sha256sum }}
{{- end }}
{{- end }}

{{/* The certificate for metrics and probes, mounted into every part but admission, which has its own. */}}
{{- define "gpushare.tlsEnv" -}}
{{- if .Values.metrics.tls.enabled }}
- name: GPUSHARE_METRICS_CERTIFICATE
  value: /metrics-tls
{{- end }}
{{- end }}
{{- define "gpushare.tlsMount" -}}
{{- if .Values.metrics.tls.enabled }}
- {name: metrics-tls, mountPath: /metrics-tls, readOnly: true}
{{- end }}
{{- end }}
{{- define "gpushare.tlsSecret" -}}
{{ .Values.metrics.tls.secret | default (printf "%s-metrics-tls" (include "gpushare.fullname" .)) }}
{{- end }}
{{- define "gpushare.tlsVolume" -}}
{{- if .Values.metrics.tls.enabled }}
- name: metrics-tls
  secret:
    secretName: {{ include "gpushare.tlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- define "gpushare.tlsHost" -}}
{{ include "gpushare.fullname" . }}-metrics.{{ .Release.Namespace }}.svc
{{- end }}
{{/* How kubelet asks the port of the metrics; a probe does not verify the certificate. */}}
{{- define "gpushare.probeScheme" -}}
{{ ternary "HTTPS" "HTTP" .Values.metrics.tls.enabled }}
{{- end }}

{{/* Who signs with cert-manager: the issuer of the values, else the chart's own authority. */}}
{{- define "gpushare.issuer" -}}
{{- with .Values.certManager.issuer -}}
name: {{ .name | default (printf "%s-ca" (include "gpushare.fullname" $)) | quote }}
kind: {{ ternary .kind "Issuer" (ne .name "") }}
group: {{ ternary .group "cert-manager.io" (ne .name "") }}
{{- end }}
{{- end }}

{{/*
A Secret with a certificate of the chart's own authority; takes (list $ "secret's name" "host" "component"). Kept across
upgrades, and renewed by the first one in the second half of its life; one of unknown age is renewed as well.
*/}}
{{- define "gpushare.madeSecret" -}}
{{- $root := index . 0 -}}
{{- $secret := index . 1 -}}
{{- $host := index . 2 -}}
{{- $ca := "" -}}
{{- $crt := "" -}}
{{- $key := "" -}}
{{- $days := int $root.Values.admission.certificateDays -}}
{{- $old := lookup "v1" "Secret" $root.Release.Namespace $secret -}}
{{- $has := and $old $old.data (index $old.data "ca.crt") (index $old.data "tls.crt") (index $old.data "tls.key") -}}
{{- $made := "" -}}
{{- with $has }}{{ $made = dig "metadata" "annotations" "gpushare.io/made-on" "" $old }}{{ end -}}
{{- $half := now | dateModify (printf "-%dh" (mul 12 $days)) | date "2006-01-02" -}}
{{- if and $has (ge $made $half) }}
{{- $ca = index $old.data "ca.crt" }}
{{- $crt = index $old.data "tls.crt" }}
{{- $key = index $old.data "tls.key" }}
{{- else }}
{{- $made = now | date "2006-01-02" }}
{{- $authority := genCA (trimSuffix "-tls" $secret) $days }}
{{- $pair := genSignedCert $host nil (list $host (printf "%s.cluster.local" $host)) $days $authority }}
{{- /* The former authority is trusted until the next renewal: kubelet takes a minute to bring the servers the new pair. */ -}}
{{- $former := "" }}
{{- with $has }}{{ $former = regexFind "-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----" (b64dec (index $old.data "ca.crt")) }}{{ end }}
{{- $ca = b64enc (trim (printf "%s\n%s" (trim $authority.Cert) $former)) }}
{{- $crt = b64enc $pair.Cert }}
{{- $key = b64enc $pair.Key }}
{{- end -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ $secret }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "gpushare.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ index . 3 }}
  annotations:
    gpushare.io/made-on: {{ $made | quote }}
type: kubernetes.io/tls
data:
  ca.crt: {{ $ca }}
  tls.crt: {{ $crt }}
  tls.key: {{ $key }}
{{- end }}

{{/* Replicas apart: preferably on other nodes; takes (list $ "part"). */}}
{{- define "gpushare.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "gpushare.selector" . | nindent 8 }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "gpushare.selector" . | nindent 8 }}
{{- end }}

{{/* Where the agent and the MPS host run. */}}
{{- define "gpushare.nodePlacement" -}}
nodeSelector:
  kubernetes.io/os: linux
  {{- with .Values.nodes.selector }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if and .Values.nodes.affinity (not .Values.simulated.gpus) }}
affinity:
  nodeAffinity:
    {{- toYaml .Values.nodes.affinity | nindent 4 }}
{{- end }}
{{- $tolerations := .Values.nodes.tolerations | default list }}
{{- range .Values.nodes.taints }}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.priorityClasses.node }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Of the two parts that keep GPUs; the NVIDIA container toolkit shows them all. */}}
{{- define "gpushare.gpuEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if not .Values.simulated.gpus }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- end }}
{{- end }}

{{/* What becomes of pods in trouble. */}}
{{- define "gpushare.hygieneEnv" -}}
- name: GPUSHARE_HYGIENE_STALLED
  value: {{ .Values.policy.hygiene.stalled | quote }}
- name: GPUSHARE_HYGIENE_OUTSIDE_MPS
  value: {{ .Values.policy.hygiene.outsideMps | quote }}
- name: GPUSHARE_HYGIENE_FAULT
  value: {{ .Values.policy.hygiene.fault | quote }}
{{- end }}

{{/* What every part decides by, as names of environment variables. */}}
{{- define "gpushare.settings" -}}
GPUSHARE_POLICY: {{ .Values.policy.placement | quote }}
GPUSHARE_DEFAULT_CLASS: {{ .Values.defaults.class | quote }}
GPUSHARE_DEFAULT_FRACTION: {{ .Values.defaults.fraction | quote }}
GPUSHARE_MAX_SLOWDOWN: {{ .Values.policy.maxSlowdown | quote }}
GPUSHARE_LATENCY_MAX_SLOWDOWN: {{ .Values.policy.latencyMaxSlowdown | quote }}
GPUSHARE_GPU_MEMORY_RESERVE: {{ .Values.policy.gpuMemoryReserveMiB | quote }}
GPUSHARE_CHARGE_MEMORY: {{ .Values.policy.chargeMemory | quote }}
GPUSHARE_CHARGE_THREADS: {{ .Values.policy.chargeThreads | quote }}
GPUSHARE_PROBATION_SECONDS: {{ .Values.policy.probationSeconds | quote }}
GPUSHARE_MOST_PROBATIONS: {{ .Values.policy.probations | quote }}
GPUSHARE_LONGEST_PROBATION_SECONDS: {{ .Values.policy.longestProbationSeconds | quote }}
GPUSHARE_FREEZES: {{ and .Values.throttle.enabled .Values.loop.enabled | quote }}
GPUSHARE_RESERVE_AFTER_SECONDS: {{ .Values.policy.reserveAfterSeconds | quote }}
GPUSHARE_SLOWDOWN_HEADROOM: {{ .Values.policy.slowdownHeadroom | quote }}
{{- if kindIs "slice" .Values.nodes.taints }}
GPUSHARE_TAINTS: {{ join "," .Values.nodes.taints | quote }}
{{- end }}
{{- with include "gpushare.joinedWorkloads" . }}
GPUSHARE_JOINED_WORKLOADS: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Those that a node's agent needs, one by one: a change of the others does not replace the agents. */}}
{{- define "gpushare.agentSettings" -}}
{{- $settings := include "gpushare.settings" . | fromYaml -}}
{{- range list "GPUSHARE_DEFAULT_CLASS" "GPUSHARE_GPU_MEMORY_RESERVE" "GPUSHARE_MAX_SLOWDOWN" "GPUSHARE_LATENCY_MAX_SLOWDOWN" "GPUSHARE_JOINED_WORKLOADS" }}
{{- if hasKey $settings . }}
- name: {{ . }}
  value: {{ get $settings . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Workload keys that mean one workload in several namespaces: "resnet50=a,b bert=a,c". */}}
{{- define "gpushare.joinedWorkloads" -}}
{{- $taken := dict -}}
{{- $entries := list -}}
{{- range .Values.policy.joinedWorkloads -}}
{{- $workload := .workload -}}
{{- range .namespaces -}}
{{- $pair := printf "%s of namespace %s" $workload . -}}
{{- if hasKey $taken $pair -}}
{{- fail (printf "policy.joinedWorkloads: workload %s is in two entries: merge them" $pair) -}}
{{- end -}}
{{- $_ := set $taken $pair true -}}
{{- end -}}
{{- $entries = append $entries (printf "%s=%s" $workload (join "," .namespaces)) -}}
{{- end -}}
{{- $text := join " " $entries -}}
{{- if gt (len $text) 100000 -}}
{{- fail "policy.joinedWorkloads: its keys and namespaces have more than 100,000 characters, too many for an environment variable" -}}
{{- end -}}
{{- $text -}}
{{- end }}
