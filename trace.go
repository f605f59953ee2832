package shardlimit

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// tracerName is the instrumentation scope of the spans.
const tracerName = "github.com/shardlimit/caddy-shardlimit"

// startSpan begins a span of a call to a store, if the request is traced;
// otherwise the span is nil. What is known without the store makes it short.
func (open *openedStore) startSpan(ctx context.Context, operation string, reqs []store.Request) (context.Context, trace.Span) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	zones := make([]string, len(reqs))
	for i := range reqs {
		zones[i] = reqs[i].Limit.Zone
	}
	return parent.TracerProvider().Tracer(tracerName).Start(ctx, "rate_limit "+operation,
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
			attribute.String("rate_limit.store", open.name),
			attribute.StringSlice("rate_limit.zones", zones)))
}

// endSpan ends what startSpan began.
func endSpan(span trace.Span, states []store.State) {
	if span == nil {
		return
	}
	allowed := true
	for i := range states {
		if err := states[i].Err; err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, "the store cannot answer")
		} else if !states[i].Allowed {
			allowed = false
		}
	}
	span.SetAttributes(attribute.Bool("rate_limit.allowed", allowed))
	span.End()
}
