{{- define "tinkex.labels" -}}
app.kubernetes.io/name: tinkex
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tinkex.selector" -}}
app.kubernetes.io/name: tinkex
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tinkex.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Variables of nodes and fronts. Secrets are files: what is in the environment of a pod is shown by kubectl. */}}
{{- define "tinkex.environment" -}}
- name: TINKEX_DATABASE_URL_FILE
  value: /secrets/database/url
- name: TINKEX_CLUSTER_SECRET_FILE
  value: /secrets/cluster/secret
{{- if .Values.hasKeysFile }}
- name: TINKEX_KEYS_FILE
  value: /secrets/cluster/keys
{{- end }}
{{- if .Values.tlsSecret }}
- name: TINKEX_CLUSTER_CA
  value: /secrets/tls/ca.crt
{{- end }}
{{- range $name, $value := .Values.extraEnv }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "tinkex.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tinkex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
