{{/* A job's command line, for the shell in which Ray runs it. */}}
{{- define "dspark.entrypoint" -}}
{{- range $option := eq .Values.job.command "batch" | ternary (list "--input" "--output") list -}}
{{- if not (regexMatch (printf "(^| )%s[ =]" $option) (join " " $.Values.job.args)) -}}
{{- fail (printf "job.args has no %s: a batch needs [--input, FILE, --output, FILE], on a volume that the head sees, such as /models" $option) -}}
{{- end -}}
{{- end -}}
{{- $words := list "dspark-cluster" .Values.job.command -}}
{{- if eq .Values.job.command "batch" -}}{{- $words = append $words "--config" -}}{{- end -}}
{{- range concat (append $words (include "dspark.configFile" .)) .Values.job.args }}{{ . | toString | squote }} {{ end -}}
{{- end -}}

{{/* A pod outside Ray, with this image: takes root, component, container's name, and perhaps command and env. */}}
{{- define "dspark.clientPod" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "dspark.selectorLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "dspark.serviceAccountName" .root }}
  automountServiceAccountToken: false
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  containers:
    - name: {{ .container }}
      image: {{ include "dspark.image" (dict "root" .root "group" $v.head) }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      {{- with .command }}
      command:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "dspark.env" .root | nindent 8 }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
      resources:
        requests: {cpu: 100m, memory: 512Mi}
        limits: {memory: 2Gi}
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "dspark.mounts" . | nindent 8 }}
  volumes:
    {{- include "dspark.volumes" . | nindent 4 }}
{{- end -}}

{{/* Of a process that talks to the head's job server. */}}
{{- define "dspark.submitEnv" -}}
- name: RAY_API_SERVER_ADDRESS
  value: http://{{ include "dspark.headService" . }}:8265
{{- if .Values.rayToken.enabled }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ default (include "dspark.fullname" .) .Values.rayToken.secretName }}, key: auth_token}}
{{- end }}
{{- end -}}

{{/* The pod that has Ray run `up`. */}}
{{- define "dspark.upPod" -}}
{{- $command := list "python" "/etc/dspark-cluster/config/up.py" (include "dspark.configFile" .) (include "dspark.run" .) (include "dspark.fullname" .) (.Values.gateway.port | toString) -}}
{{- include "dspark.clientPod" (dict "root" . "component" "up" "container" "up" "command" $command "env" (include "dspark.submitEnv" .)) -}}
{{- end -}}

{{/* Another name for any other cluster or settings: the run of `up` that belongs to these. */}}
{{- define "dspark.run" -}}
up-{{ printf "%s\n%s" (include "dspark.config" .) (include "dspark.clusterSpec" .) | sha256sum | trunc 10 }}
{{- end -}}

{{/* For the notes: commands by which a user's `ray job` reaches the head. */}}
{{- define "dspark.reachHead" -}}
{{- $in := printf "-n %s" .Release.Namespace }}
{{- "  " }}kubectl {{ $in }} port-forward svc/{{ include "dspark.headService" . }} 8265 &
{{- if .Values.rayToken.enabled }}
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(kubectl {{ $in }} get secret {{ default (include "dspark.fullname" .) .Values.rayToken.secretName }} -o jsonpath='{.data.auth_token}' | base64 -d)
{{- end }}
{{- end -}}

{{/* Of a command that asks the gateway, in a pod that has its secrets: the head's, and the test's. */}}
{{- define "dspark.clientOptions" -}}
--address {{ include "dspark.fullname" . }}:{{ .Values.gateway.port }}
{{- with .Values.gateway.tls -}}
{{- if .secretName }} --tls-ca /etc/dspark-cluster/tls/ca.crt{{ end -}}
{{- if and .secretName .clientCa }} --tls-certificate /etc/dspark-cluster/tls/tls.crt --tls-key /etc/dspark-cluster/tls/tls.key{{ end -}}
{{- end -}}
{{- if .Values.gateway.token.secretName }} --token-file /etc/dspark-cluster/token/token{{ end -}}
{{- end -}}
