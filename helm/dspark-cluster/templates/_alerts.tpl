{{- define "dspark.alerts" -}}
{{- $pods := printf `namespace="%s",pod=~"%s-.*"` .Release.Namespace (include "dspark.fullname" .) -}}
{{- $of := printf "{%s}" $pods -}}
- alert: DsparkGatewayAbsent
  expr: absent(dspark_running_choices{{ $of }})
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: Nobody serves
    description: The gateway has shown no figures for 5 minutes. Look at the job `up`, and at `dspark-cluster status` on the head.
- alert: DsparkReplicaDown
  expr: dspark_replica_up{{ $of }} == 0
  for: 2m
  labels: {severity: critical}
  annotations:
    summary: {{ "Target replica {{ $labels.replica }} doesn't answer" | quote }}
    description: The others take its requests. Look at its log in Ray's dashboard.
- alert: DsparkDraftLost
  expr: dspark_draft_lost{{ $of }} == 1
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: {{ "Replica {{ $labels.replica }} decodes without its draft" | quote }}
    description: Answers are right, and slower. Look at the draft worker's log in Ray's dashboard.
- alert: DsparkDraftFlaps
  expr: increase(dspark_draft_losses_total{{ $of }}[30m]) > 3
  labels: {severity: warning}
  annotations:
    summary: {{ "Replica {{ $labels.replica }} loses its draft again and again" | quote }}
    description: Each time it decodes alone until the draft is back. Look at the draft worker's log in Ray's dashboard, and at what it shares its GPU and network with.
- alert: DsparkFewTokensAccepted
  expr: |-
    1 + sum by (replica) (rate(vllm:spec_decode_num_accepted_tokens_total{{ $of }}[15m]))
      / sum by (replica) (rate(vllm:spec_decode_num_drafts_total{{ $of }}[15m])) < {{ .Values.monitoring.alerts.minAcceptanceLength }}
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: {{ "Acceptance length of {{ $labels.replica }} is {{ $value }}" | quote }}
    description: The draft costs more than it gives. It may not be the target's, or not for these prompts.
- alert: DsparkQueueGrows
  expr: dspark_queued_choices{{ $of }} > {{ .Values.monitoring.alerts.maxQueuedChoices }}
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: {{ "{{ $value }} choices wait" | quote }}
    description: Requests come faster than the replicas answer. Raise gateway.limits.max_running and engine.max_num_seqs in `config`, or add replicas.
- alert: DsparkCallsFail
  expr: |-
    sum by (method) (rate(dspark_grpc_requests_total{ {{- $pods }},status=~"INTERNAL|UNAVAILABLE|UNKNOWN"}[5m]))
      / sum by (method) (rate(dspark_grpc_requests_total{{ $of }}[5m])) > 0.05
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: {{ "{{ $value | humanizePercentage }} of the calls of {{ $labels.method }} fail" | quote }}
    description: Their statuses are the server's fault, not the client's. Look at the gateway's log.
{{- end -}}
