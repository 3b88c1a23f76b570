{{/* Room is left for the longest suffix: a Service's name has 63 characters at most. */}}
{{- define "sluice.name" -}}
{{ printf "%s-operator" (.Release.Name | trunc 45 | trimSuffix "-") }}
{{- end }}

{{/* Objects without a namespace: two releases of one name must not meet. */}}
{{- define "sluice.clusterName" -}}
{{ printf "%s:%s" .Release.Namespace (include "sluice.name" .) }}
{{- end }}

{{- define "sluice.account" -}}
{{ .Values.serviceAccount.name | default (include "sluice.name" .) }}
{{- end }}

{{/* Namespaces that the operator works in, by comma; nothing for all. */}}
{{- define "sluice.watched" -}}
{{- if not .Values.watchAllNamespaces }}{{ join "," (.Values.watchNamespaces | default (list .Release.Namespace)) }}{{ end }}
{{- end }}

{{- define "sluice.image" -}}
{{- with .Values.image -}}
{{- $repository := .repository | default (include "sluice.repository" (list $ "operator")) -}}
{{- if .digest }}{{ $repository }}@{{ .digest }}{{ else }}{{ $repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* Image of a part, as a release names it. The argument: the context, the part. */}}
{{- define "sluice.repository" -}}
{{- with (first .).Values.registry }}{{ . }}/{{ end }}sluice-{{ last . }}
{{- end }}

{{- define "sluice.released" -}}
{{ include "sluice.repository" . }}:{{ (first .).Chart.AppVersion }}
{{- end }}

{{/* A map as NAME=VALUE, by comma. */}}
{{- define "sluice.pairs" -}}
{{- $pairs := list }}{{ range $name, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $name $value) }}{{ end }}
{{- join "," $pairs }}
{{- end }}

{{/* Filled by cert-manager, or the user's own. */}}
{{- define "sluice.tlsSecret" -}}
{{- if eq .Values.tls.mode "SecretRef" }}{{ .Values.tls.secretName }}{{ else }}{{ include "sluice.name" . }}-tls{{ end }}
{{- end }}

{{/* The first is what the routers' network policies know the operator by (names.py, MANAGER). */}}
{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.commonLabels" . }}
{{ include "sluice.selector" . }}
{{- end }}

{{/* Of what is no pod of the operator. */}}
{{- define "sluice.commonLabels" -}}
app.kubernetes.io/part-of: sluice
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Kubernetes' Pod Security level "restricted". */}}
{{- define "sluice.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "sluice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
