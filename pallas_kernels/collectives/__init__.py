"""All-gather, reduce-scatter and all-reduce that cast while they send and add in float32."""
