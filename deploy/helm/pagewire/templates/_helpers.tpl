{{- define "pagewire.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* (list root component) */}}
{{- define "pagewire.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "pagewire.labels" -}}
{{- $root := index . 0 -}}
{{ include "pagewire.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- define "pagewire.redisUrl" -}}
{{- if .Values.valkey.enabled }}redis://{{ include "pagewire.name" . }}-valkey:6379{{ else }}{{ .Values.redisUrl }}{{ end }}
{{- end }}

{{- define "pagewire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "pagewire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* What router and workers have in common. (list root component preStopSeconds) */}}
{{- define "pagewire.podHead" -}}
{{- $root := index . 0 -}}
automountServiceAccountToken: false
securityContext: {{- include "pagewire.podSecurity" $root | nindent 2 }}
terminationGracePeriodSeconds: {{ add $root.Values.drainTimeoutSeconds (index . 2) 15 }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "pagewire.selector" . | nindent 8 }}
{{- end }}

{{- define "pagewire.env" -}}
- { name: PAGEWIRE_DRAIN_TIMEOUT, value: {{ .Values.drainTimeoutSeconds | quote }} }
{{- with include "pagewire.redisUrl" . }}
- { name: PAGEWIRE_REDIS_URL, value: {{ . | quote }} }
{{- end }}
{{- with .Values.model.servedName }}
- { name: PAGEWIRE_SERVED_MODEL_NAME, value: {{ . | quote }} }
{{- end }}
{{- with .Values.tracing.endpoint }}
- { name: PAGEWIRE_OTLP_TRACES_ENDPOINT, value: {{ . | quote }} }
{{- end }}
{{- if .Values.tls.secretName }}
- { name: PAGEWIRE_TLS_CERT, value: /tls/tls.crt }
- { name: PAGEWIRE_TLS_KEY, value: /tls/tls.key }
- { name: PAGEWIRE_TLS_CA, value: /tls/ca.crt }
{{- end }}
{{- if .Values.auth.tokenSecretName }}
- { name: PAGEWIRE_AUTH_TOKEN_FILE, value: /auth/tokens }
{{- end }}
{{- end }}

{{- define "pagewire.mounts" -}}
- { name: model, mountPath: {{ .Values.model.path }}, readOnly: true }
- { name: tmp, mountPath: /tmp }
{{- if .Values.tls.secretName }}
- { name: tls, mountPath: /tls, readOnly: true }
{{- end }}
{{- if .Values.auth.tokenSecretName }}
- { name: auth, mountPath: /auth, readOnly: true }
{{- end }}
{{- end }}

{{- define "pagewire.volumes" -}}
- name: model
  {{- toYaml .Values.model.volume | nindent 2 }}
- { name: tmp, emptyDir: { sizeLimit: 256Mi } }
{{- with .Values.tls.secretName }}
- { name: tls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- with .Values.auth.tokenSecretName }}
- { name: auth, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- end }}

{{/* Kubernetes' gRPC probes speak no TLS. (list root port service) */}}
{{- define "pagewire.probe" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.tls.secretName -}}
exec: { command: [pagewire, health, --target, "localhost:{{ index . 1 }}", --service, {{ index . 2 | quote }}] }
{{- else -}}
grpc: { port: {{ index . 1 }}, service: {{ index . 2 | quote }} }
{{- end }}
{{- end }}
