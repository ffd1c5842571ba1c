{{- define "lora-serve.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "lora-serve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lora-serve.labels" -}}
{{ include "lora-serve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "lora-serve.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "lora-serve.isStateful" -}}
{{- if and .Values.kv.disk.enabled .Values.kv.disk.persistent }}yes{{ end -}}
{{- end }}

{{- define "lora-serve.kind" -}}
{{- if include "lora-serve.isStateful" . }}StatefulSet{{ else }}Deployment{{ end -}}
{{- end }}

{{- /* The command line of the server, a word an item. */}}
{{- define "lora-serve.args" -}}
- serve
{{- with .Values.model.name }}
- {{ . | quote }}
{{- end }}
- --served-model-name={{ .Values.model.servedName }}
- --host=0.0.0.0
- --port=8000
- --metrics-host=0.0.0.0
- --metrics-port=8001
- --log-format=json
- --drain-timeout={{ .Values.drain.timeoutSeconds }}
{{- with .Values.model.maxLen }}
- --max-model-len={{ int64 . }}
{{- end }}
- --enable-lora
- --max-loras={{ .Values.adapters.maxLoras }}
- --max-cpu-loras={{ .Values.adapters.maxCpuLoras }}
{{- if .Values.adapters.volume }}
- --lora-allowed-roots=/adapters
{{- end }}
{{- with .Values.adapters.modules }}
- --lora-modules
{{- range $name, $path := . }}
- {{ printf "%s=%s" $name $path | quote }}
{{- end }}
{{- end }}
{{- with .Values.adapters.resolver }}
- --lora-resolver
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- if has "hf" . }}
- --lora-allow-hub
{{- end }}
{{- end }}
{{- with .Values.catalog }}
{{- if .url }}
- --lora-catalog={{ .url }}
{{- with .name }}
- {{ printf "--lora-catalog-name=%s" . | quote }}
{{- end }}
{{- if .existingSecret }}
- --lora-catalog-password-file=/secrets/catalog/redis.key
{{- end }}
{{- end }}
{{- end }}
{{- if not .Values.auth.open }}
- --api-key-file=/secrets/auth/tenants.keys
- --admin-api-key-file=/secrets/auth/admin.keys
- --{{ if not .Values.auth.isolateKeys }}no-{{ end }}isolate-api-keys
{{- end }}
{{- with .Values.kv.ramBytes }}
- --kv-ram-bytes={{ int64 . }}
{{- end }}
{{- if .Values.kv.disk.enabled }}
- --kv-disk-path=/kv/tier
- --kv-disk-bytes={{ int64 .Values.kv.disk.bytes }}
{{- end }}
{{- with .Values.kv.redis }}
{{- if .url }}
- --kv-redis-url={{ .url }}
{{- if .existingSecret }}
- --kv-redis-password-file=/secrets/redis/redis.key
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.kv.macKey }}
- --kv-mac-key-file=/secrets/auth/kv.keys
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
