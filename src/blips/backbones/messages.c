/* Messages of PaiNN in one pass over the edges, which keeps what belongs to an edge in cache.
 *
 * Tensors are float32 and contiguous. Edge e brings to atom i = receiver[e], from j = sender[e],
 *
 *     scalars   f0 s0
 *     vectors   f1 s1 unit + f2 carried
 *
 * with the filters f = [f0 f1 f2] of the edge, s = [s0 s1] and carried [3, width] of atom j, each of
 * `width` channels. Without carried vectors there is no f2. `blips.backbones._fast` calls this by
 * ctypes, and does without where it was not built. Sums are made in the order of torch's, so that the
 * result is the same to the last bit.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

#define LANES 16 /* sums side by side, so that they need not be made in order */

static inline float sum(const float *lanes) {
    float total = 0.0f;
    for (int j = 0; j < LANES; j++) total += lanes[j];
    return total;
}

/* Adds to scalars [N, width] and vectors [N, 3, width]. */
VECTORISED void blips_messages(const float *restrict filters, const float *restrict sent,
                               const float *restrict carried, const float *restrict unit,
                               const int64_t *restrict receiver, const int64_t *restrict sender,
                               float *restrict scalars, float *restrict vectors, ptrdiff_t edges,
                               ptrdiff_t width) {
    ptrdiff_t parts = carried ? 3 : 2;
    for (ptrdiff_t e = 0; e < edges; e++, unit += 3) {
        const float *f = filters + e * parts * width;
        const float *s = sent + sender[e] * 2 * width;
        float *to_scalars = scalars + receiver[e] * width;
        float *to_vectors = vectors + receiver[e] * 3 * width;
        for (ptrdiff_t c = 0; c < width; c++) to_scalars[c] += f[c] * s[c];
        const float *v = carried ? carried + sender[e] * 3 * width : NULL;
        for (int x = 0; x < 3; x++) {
            float *to = to_vectors + x * width;
            if (v)
                for (ptrdiff_t c = 0; c < width; c++) {
                    float along = f[width + c] * s[width + c];
                    to[c] += along * unit[x] + f[2 * width + c] * v[x * width + c];
                }
            else
                for (ptrdiff_t c = 0; c < width; c++) {
                    float along = f[width + c] * s[width + c];
                    to[c] += along * unit[x];
                }
        }
    }
}

/* From the gradients of both sums to those of filters and unit, and, added, of sent and carried. */
VECTORISED void blips_messages_backward(
    const float *restrict by_scalars, const float *restrict by_vectors,
    const float *restrict filters, const float *restrict sent, const float *restrict carried,
    const float *restrict unit, const int64_t *restrict receiver, const int64_t *restrict sender,
    float *restrict by_filters, float *restrict by_sent, float *restrict by_carried,
    float *restrict by_unit, ptrdiff_t edges, ptrdiff_t width) {
    ptrdiff_t parts = carried ? 3 : 2;
    for (ptrdiff_t e = 0; e < edges; e++, unit += 3, by_unit += 3) {
        const float *f = filters + e * parts * width;
        const float *s = sent + sender[e] * 2 * width;
        const float *gs = by_scalars + receiver[e] * width;
        const float *gv = by_vectors + receiver[e] * 3 * width;
        float *gf = by_filters + e * parts * width;
        float *gt = by_sent + sender[e] * 2 * width;
        float x[LANES] = {0}, y[LANES] = {0}, z[LANES] = {0};
        for (ptrdiff_t first = 0; first < width; first += LANES) {
            int count = width - first < LANES ? (int)(width - first) : LANES;
            for (int j = 0; j < count; j++) {
                ptrdiff_t c = first + j;
                float along = f[width + c] * s[width + c];
                float by_along =
                    gv[c] * unit[0] + gv[width + c] * unit[1] + gv[2 * width + c] * unit[2];
                gf[c] = gs[c] * s[c];
                gt[c] += gs[c] * f[c];
                gf[width + c] = by_along * s[width + c];
                gt[width + c] += by_along * f[width + c];
                x[j] += gv[c] * along;
                y[j] += gv[width + c] * along;
                z[j] += gv[2 * width + c] * along;
            }
        }
        by_unit[0] = sum(x);
        by_unit[1] = sum(y);
        by_unit[2] = sum(z);
        if (!carried) continue;
        const float *v = carried + sender[e] * 3 * width;
        float *gc = by_carried + sender[e] * 3 * width;
        for (ptrdiff_t c = 0; c < width; c++) {
            float gate = f[2 * width + c];
            gf[2 * width + c] =
                gv[c] * v[c] + gv[width + c] * v[width + c] + gv[2 * width + c] * v[2 * width + c];
            gc[c] += gv[c] * gate;
            gc[width + c] += gv[width + c] * gate;
            gc[2 * width + c] += gv[2 * width + c] * gate;
        }
    }
}
