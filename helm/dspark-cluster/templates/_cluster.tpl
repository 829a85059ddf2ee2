{{/* The spec of a RayCluster, alone or within a RayJob. */}}
{{- define "dspark.clusterSpec" -}}
{{- $v := .Values -}}
rayVersion: {{ $v.rayVersion | quote }}
{{- if ne $v.mode "job" }}
upgradeStrategy: {type: {{ $v.upgradeStrategy }}}
{{- end }}
{{- if $v.rayToken.enabled }}
authOptions:
  mode: token
  {{- with $v.rayToken.secretName }}
  secretName: {{ . }}
  {{- end }}
{{- else }}
authOptions: {mode: disabled}
{{- end }}
{{- with $v.gcsFaultTolerance }}
{{- if .redisAddress }}
gcsFaultToleranceOptions:
  redisAddress: {{ .redisAddress }}
  {{- if .passwordSecret.name }}
  redisPassword: {valueFrom: {secretKeyRef: {name: {{ .passwordSecret.name }}, key: {{ .passwordSecret.key }}}}}
  {{- end }}
{{- end }}
{{- end }}
{{- if $v.autoscaling.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ $v.autoscaling.idleTimeoutSeconds }}
  securityContext:
    {{- toYaml $v.securityContext | nindent 4 }}
{{- end }}
headGroupSpec:
  labels: {pool: head}
  rayStartParams:
    # No actor that asks for a CPU may come here.
    {{- toYaml (merge (deepCopy (default dict $v.head.rayStartParams)) (dict "num-cpus" "0" "num-gpus" "0" "dashboard-host" "0.0.0.0")) | nindent 4 }}
  template:
    {{- include "dspark.podTemplate" (dict "root" . "component" "head" "group" $v.head) | nindent 4 }}
workerGroupSpecs:
  {{- if include "dspark.serves" . }}
  {{- $gateway := merge (dict "replicas" 1 "minReplicas" 1 "maxReplicas" 1) (deepCopy $v.gateway) }}
  {{- $_ := set $gateway "rayStartParams" (merge (deepCopy (default dict $v.gateway.rayStartParams)) (dict "num-cpus" "0")) }}
  {{- include "dspark.workerGroup" (dict "root" . "component" "gateway" "group" $gateway) | nindent 2 }}
  {{- end }}
  {{- if $v.colocate.enabled }}
  {{- include "dspark.workerGroup" (dict "root" . "component" "pair" "group" (include "dspark.pair" . | fromYaml)) | nindent 2 }}
  {{- else }}
  {{- include "dspark.workerGroup" (dict "root" . "component" "target" "group" $v.target) | nindent 2 }}
  {{- if $v.model.draft }}
  {{- $draft := merge (dict "replicas" (include "dspark.draftReplicas" . | int)) (deepCopy $v.draft) }}
  {{- include "dspark.workerGroup" (dict "root" . "component" "draft" "group" $draft) | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "dspark.workerGroup" -}}
{{- $minimum := kindIs "invalid" .group.minReplicas | ternary .group.replicas .group.minReplicas -}}
{{- $maximum := kindIs "invalid" .group.maxReplicas | ternary .group.replicas .group.maxReplicas -}}
- groupName: {{ .component }}
  replicas: {{ .group.replicas }}
  minReplicas: {{ $minimum }}
  maxReplicas: {{ $maximum }}
  labels: {pool: {{ .component }}}
  rayStartParams:
    {{- toYaml (default dict .group.rayStartParams) | nindent 4 }}
  template:
    {{- include "dspark.podTemplate" . | nindent 4 }}
{{- end -}}

{{/* The target's group, with room for both processes: one container, so one /dev/shm, one set of GPUs and one process
     namespace, without which CUDA can't hand memory from one process to the other. */}}
{{- define "dspark.pair" -}}
{{- $pair := deepCopy .Values.target -}}
{{- if not .Values.colocate.sharedGpu -}}
{{- $_ := set $pair "gpus" (add .Values.target.gpus .Values.draft.gpus) -}}
{{- end -}}
{{- toYaml $pair -}}
{{- end -}}
