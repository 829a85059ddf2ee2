{{/* A pod of Ray as KubeRay takes it: the command that starts Ray, its health probes and RAY_ADDRESS are KubeRay's.
     Takes root, component (head, gateway, target, draft or pair) and group, whose values it has. */}}
{{- define "dspark.podTemplate" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $group := .group -}}
{{- $component := .component -}}
{{- $pool := has $component (list "target" "draft" "pair") -}}
{{- $serves := include "dspark.serves" $root -}}
metadata:
  labels:
    {{- include "dspark.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
    {{- with $group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := deepCopy (default dict $group.podAnnotations) }}
  {{- if and $v.kueue.requiredTopology $pool }}
  {{- $_ := set $annotations "kueue.x-k8s.io/podset-required-topology" $v.kueue.requiredTopology }}
  {{- else if and $v.kueue.preferredTopology $pool }}
  {{- $_ := set $annotations "kueue.x-k8s.io/podset-preferred-topology" $v.kueue.preferredTopology }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "dspark.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and $v.autoscaling.enabled (eq $component "head") }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- if $serves }}
  # The drain, and time for the engines to close.
  terminationGracePeriodSeconds: {{ add $v.gateway.drainGraceSeconds 60 }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $group.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ eq $component "head" | ternary "ray-head" "ray-worker" }}
      image: {{ include "dspark.image" (dict "root" $root "group" $group) }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      securityContext:
        {{- include "dspark.securityContext" . | nindent 8 }}
      env:
        {{- include "dspark.env" $root | nindent 8 }}
        {{- if eq $component "head" }}
        # For a job that is stopped to end its requests, and a cluster that it has started.
        - name: RAY_JOB_STOP_WAIT_TIME_S
          value: {{ add $v.gateway.drainGraceSeconds 60 | quote }}
        {{- end }}
        {{- with $group.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if eq $component "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        {{- if eq $component "gateway" }}
        - {name: grpc, containerPort: {{ $v.gateway.port }}}
        - {name: dspark-metrics, containerPort: {{ $v.gateway.metricsPort }}}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      resources:
        {{- include "dspark.resources" . | nindent 8 }}
      {{- if eq $component "gateway" }}
      {{- include "dspark.gatewayProbes" $root | nindent 6 }}
      {{- end }}
      {{- if and $serves (ne $component "draft") }}
      lifecycle:
        preStop:
          {{- if $pool }}
          exec:
            command: [dspark-cluster, drain, --here, --grace, {{ $v.gateway.drainGraceSeconds | quote }}]
          {{- else }}
          # Nobody is sent to a pod that is to go; who is there has this long, and the pools' drains have a head to ask.
          sleep: {seconds: {{ $v.gateway.drainGraceSeconds }}}
          {{- end }}
      {{- end }}
      volumeMounts:
        {{- include "dspark.mounts" . | nindent 8 }}
  volumes:
    {{- include "dspark.volumes" . | nindent 4 }}
{{- end -}}

{{- define "dspark.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if .group.rdma -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK") -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* The group's, with its GPUs and RDMA devices, which Kubernetes takes as limits. */}}
{{- define "dspark.resources" -}}
{{- $resources := deepCopy (default dict .group.resources) -}}
{{- $limits := default dict $resources.limits -}}
{{- with .group.gpus | int -}}{{- $_ := set $limits $.group.gpuResource . -}}{{- end -}}
{{- with .group.rdma -}}{{- $_ := set $limits .resource (.count | int) -}}{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- with .group.resourceClaims -}}
{{- $claims := list -}}
{{- range . -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Every pod's. What is written lies in volumes: the root file system is read-only. */}}
{{- define "dspark.env" -}}
- name: HOME
  value: /home/dspark
- name: HF_HOME
  value: {{ .Values.modelCache.mountPath }}/huggingface
- name: DSPARK_CACHE
  value: {{ .Values.modelCache.mountPath }}/dspark-cluster
{{- with .Values.huggingFace.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Kubernetes' own gRPC probes speak no TLS: with it, what can be asked is whether the port is open. */}}
{{- define "dspark.gatewayProbes" -}}
{{- $probe := printf "grpc: {port: %d, service: dspark.v1.GenerationService}" (.Values.gateway.port | int) -}}
{{- if .Values.gateway.tls.secretName -}}
{{- $probe = "tcpSocket: {port: grpc}" -}}
{{- end -}}
{{- if eq .Values.mode "serve" -}}
# Nobody listens until the models are loaded.
startupProbe:
  {{ $probe }}
  periodSeconds: 10
  failureThreshold: {{ div (add .Values.gateway.startupSeconds 9) 10 }}
{{ end -}}
readinessProbe:
  {{ $probe }}
  periodSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "dspark.mounts" -}}
- {name: config, mountPath: /etc/dspark-cluster/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/dspark}
- {name: shm, mountPath: /dev/shm}
- {name: models, mountPath: {{ .root.Values.modelCache.mountPath }}}
{{- if include "dspark.hasToken" . }}
- {name: token, mountPath: /etc/dspark-cluster/token, readOnly: true}
{{- end }}
{{- if include "dspark.hasTls" . }}
- {name: tls, mountPath: /etc/dspark-cluster/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "dspark.volumes" -}}
{{- $v := .root.Values -}}
- name: config
  configMap: {name: {{ include "dspark.fullname" .root }}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $v.shm.size }}}
- name: models
  {{- if or $v.modelCache.existingClaim $v.modelCache.size }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-models" (include "dspark.fullname" .root)) $v.modelCache.existingClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if include "dspark.hasToken" . }}
- name: token
  secret:
    secretName: {{ $v.gateway.token.secretName }}
    items: [{key: {{ $v.gateway.token.key }}, path: token}]
{{- end }}
{{- if include "dspark.hasTls" . }}
- name: tls
  secret: {secretName: {{ $v.gateway.tls.secretName }}}
{{- end }}
{{- end -}}

{{/* `up` reads the token on the head, where batches run, too; the test's pod sends it. */}}
{{- define "dspark.hasToken" -}}
{{- if and (include "dspark.serves" .root) .root.Values.gateway.token.secretName (has .component (list "head" "test")) }}true{{ end -}}
{{- end -}}

{{- define "dspark.hasTls" -}}
{{- if and (include "dspark.serves" .root) .root.Values.gateway.tls.secretName (has .component (list "head" "gateway" "test")) }}true{{ end -}}
{{- end -}}
