{{/* Short enough for KubeRay, which adds to it and cuts at 50. */}}
{{- define "dspark.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{/* What KubeRay calls the head's service. */}}
{{- define "dspark.headService" -}}
{{ include "dspark.fullname" . }}-head-svc
{{- end -}}

{{- define "dspark.serviceAccountName" -}}
{{- default (ternary (include "dspark.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "dspark.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: dspark-cluster
{{- end -}}

{{- define "dspark.labels" -}}
{{ include "dspark.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Whether there is a gateway for clients: a job asks its own. */}}
{{- define "dspark.serves" -}}
{{- if ne .Values.mode "job" }}true{{ end -}}
{{- end -}}

{{/* Takes root and group. */}}
{{- define "dspark.image" -}}
{{- $own := default dict .group.image -}}
{{- $tag := default (printf "%s-gpu" .root.Chart.AppVersion) .root.Values.image.tag -}}
{{ default .root.Values.image.repository $own.repository }}:{{ default $tag $own.tag }}
{{- end -}}

{{- define "dspark.target" -}}
{{ required "model.target is needed: a folder that every pod sees, or a hub name (--set model.target=Qwen/Qwen3-8B)" .Values.model.target }}
{{- end -}}

{{/* The draft's pods, as many as the target's unless said otherwise. */}}
{{- define "dspark.draftReplicas" -}}
{{- $own := .Values.draft.replicas -}}
{{- kindIs "invalid" $own | ternary .Values.target.replicas $own -}}
{{- end -}}

{{/* Of a GPU, for one process of the pool. */}}
{{- define "dspark.gpuShare" -}}
{{- if not (.group.gpus | int) }}0{{ else if and .root.Values.colocate.enabled .root.Values.colocate.sharedGpu }}0.5{{ else }}1{{ end -}}
{{- end -}}

{{/* GPUs of one process of the target: one a tensor-parallel rank, or its share. */}}
{{- define "dspark.targetGpus" -}}
{{- $v := .Values -}}
{{- $ranks := dig "engine" "tensor_parallel_size" 1 $v.config | int -}}
{{- $gpus := $v.target.gpus | int -}}
{{- if and $gpus (gt $ranks 1) -}}
{{- if lt $gpus $ranks -}}
{{- fail (printf "target.gpus is %d beside config.engine.tensor_parallel_size: %d: each rank needs one; give target.gpus=%d" $gpus $ranks $ranks) -}}
{{- end -}}
{{- if and $v.colocate.enabled $v.colocate.sharedGpu -}}
{{- fail (printf "colocate.sharedGpu is set beside config.engine.tensor_parallel_size: %d: each rank needs a whole GPU; leave one of them out" $ranks) -}}
{{- end -}}
{{- $ranks -}}
{{- else -}}
{{- include "dspark.gpuShare" (dict "root" . "group" $v.target) -}}
{{- end -}}
{{- end -}}

{{/* The label of Ray's nodes that have a pool: both of a pair, where they share pods. */}}
{{- define "dspark.pool" -}}
{{- ternary "pair" .pool .root.Values.colocate.enabled -}}
{{- end -}}

{{/* The settings file, which `config` may change. */}}
{{- define "dspark.config" -}}
{{- $v := .Values -}}
{{- $model := dict "target" (include "dspark.target" .) -}}
{{- $target := dict "num_gpus" (include "dspark.targetGpus" . | float64) "labels" (dict "pool" (include "dspark.pool" (dict "root" . "pool" "target"))) -}}
{{- $pools := dict "replicas" ($v.target.replicas | int) "target" $target -}}
{{- if $v.model.draft -}}
{{- $_ := set $model "draft" $v.model.draft -}}
{{- if $v.model.numSpeculativeTokens -}}{{- $_ := set $model "num_speculative_tokens" ($v.model.numSpeculativeTokens | int) -}}{{- end -}}
{{- $_ := set $pools "draft" (dict "num_gpus" (include "dspark.gpuShare" (dict "root" . "group" $v.draft) | float64) "labels" (dict "pool" (include "dspark.pool" (dict "root" . "pool" "draft")))) -}}
{{- $_ := set $pools "hosts" (ternary "same" "different" $v.colocate.enabled) -}}
{{- end -}}
{{- $ray := dict "placement_timeout_s" ($v.up.placementSeconds | int) "start_timeout_s" ($v.up.startSeconds | int) -}}
{{- $config := dict "model" $model "pools" $pools "ray" $ray -}}
{{- if include "dspark.serves" . -}}
{{- $gateway := dict "host" "0.0.0.0" "port" ($v.gateway.port | int) "metrics_host" "0.0.0.0" "metrics_port" ($v.gateway.metricsPort | int) "drain_grace_s" ($v.gateway.drainGraceSeconds | int) "labels" (dict "pool" "gateway") -}}
{{- if $v.gateway.tls.secretName -}}
{{- $tls := dict "certificate" "/etc/dspark-cluster/tls/tls.crt" "key" "/etc/dspark-cluster/tls/tls.key" -}}
{{- if $v.gateway.tls.clientCa -}}{{- $_ := set $tls "client_ca" "/etc/dspark-cluster/tls/ca.crt" -}}{{- end -}}
{{- $_ := set $gateway "tls" $tls -}}
{{- end -}}
{{- if $v.gateway.token.secretName -}}{{- $_ := set $gateway "token_file" "/etc/dspark-cluster/token/token" -}}{{- end -}}
{{- $_ := set $config "gateway" $gateway -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy $v.config)) -}}
{{- end -}}

{{- define "dspark.configFile" -}}
/etc/dspark-cluster/config/cluster.yaml
{{- end -}}
