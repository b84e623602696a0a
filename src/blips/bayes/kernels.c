/* What the estimators do besides matrix products, in one pass over memory each.
 *
 * Tensors are float32, contiguous, [rows, irrep, channels]; coefficients are one float per row. Signs are
 * bits of 32-bit words, ceil(channels / 32) words per row: bit 31 - j of a word is the sign of its
 * channel j. `blips.bayes.kernels` calls this by ctypes, and does without where it was not built.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

#define SIGN_BIT 0x80000000u

static inline float flipped(float x, uint32_t word, int channel) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= (word << channel) & SIGN_BIT;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* What is done for the channels of one word. A constant count is faster, and 32 the common one: BY_WORD
 * makes two versions. */
#define INLINED static inline __attribute__((always_inline))
#define BY_WORD(step, count, ...) ((count) == 32 ? step(__VA_ARGS__, 32) : step(__VA_ARGS__, count))

INLINED void flip_word(const float *x, float *out, float factor, uint32_t word, int count) {
#pragma GCC ivdep
    for (int j = 0; j < count; j++) out[j] = factor * flipped(x[j], word, j);
}

INLINED void add_flipped_word(const float *restrict x, float *restrict z, float factor,
                              uint32_t word, int count) {
    for (int j = 0; j < count; j++) z[j] += factor * flipped(x[j], word, j);
}

INLINED float flip_and_dot_word(float *restrict x, const float *restrict y, uint32_t word,
                                int count) {
    float sum = 0.0f;
    for (int j = 0; j < count; j++) {
        x[j] = flipped(x[j], word, j);
        sum += x[j] * y[j];
    }
    return sum;
}

static inline int count_of(ptrdiff_t first, ptrdiff_t channels) {
    return channels - first < 32 ? (int)(channels - first) : 32;
}

/* out = sqrt(coef) * sign * x; out may be x. */
VECTORISED void blips_flip(const float *x, const uint32_t *words, const float *coef, float *out,
                           ptrdiff_t rows, ptrdiff_t irrep, ptrdiff_t channels) {
    ptrdiff_t words_per_row = (channels + 31) / 32;
    for (ptrdiff_t row = 0; row < rows; row++, words += words_per_row) {
        float factor = coef ? sqrtf(coef[row]) : 1.0f;
        for (ptrdiff_t i = 0; i < irrep; i++)
            for (ptrdiff_t first = 0; first < channels; first += 32) {
                uint32_t word = words[first / 32];
                int count = count_of(first, channels);
                BY_WORD(flip_word, count, x, out, factor, word);
                x += count;
                out += count;
            }
    }
}

/* z += sqrt(coef) * sign * x */
VECTORISED void blips_add_flipped(const float *restrict x, const uint32_t *restrict words,
                                  const float *restrict coef, float *restrict z, ptrdiff_t rows,
                                  ptrdiff_t irrep, ptrdiff_t channels) {
    ptrdiff_t words_per_row = (channels + 31) / 32;
    for (ptrdiff_t row = 0; row < rows; row++, words += words_per_row) {
        float factor = sqrtf(coef[row]);
        for (ptrdiff_t i = 0; i < irrep; i++)
            for (ptrdiff_t first = 0; first < channels; first += 32) {
                uint32_t word = words[first / 32];
                int count = count_of(first, channels);
                BY_WORD(add_flipped_word, count, x, z, factor, word);
                x += count;
                z += count;
            }
    }
}

/* With v = var + floor: noise <- sqrt(coef / v) * noise, z += noise * v; [rows, channels] */
VECTORISED void blips_add_local(float *restrict noise, const float *restrict var,
                                const float *restrict coef, float *restrict z, float floor,
                                ptrdiff_t rows, ptrdiff_t channels) {
    for (ptrdiff_t row = 0; row < rows; row++) {
        float factor = sqrtf(coef[row]);
        for (ptrdiff_t j = 0; j < channels; j++) {
            ptrdiff_t k = row * channels + j;
            float v = var[k] + floor;
            float slope = factor * noise[k] / sqrtf(v);
            noise[k] = slope;
            z[k] += slope * v;
        }
    }
}

/* x <- x * y, out = sum over a row of x * y, with the new x, over 2 coef; [rows, width] */
VECTORISED void blips_multiply_and_dot(float *restrict x, const float *restrict y,
                                       const float *restrict coef, float *restrict out,
                                       ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t row = 0; row < rows; row++, x += width, y += width) {
        float sum = 0.0f;
        for (ptrdiff_t j = 0; j < width; j++) {
            x[j] *= y[j];
            sum += x[j] * y[j];
        }
        out[row] = sum / (2.0f * coef[row]);
    }
}

/* x <- sign * x, out = sum over a row of x * y, with the new x, over 2 coef. */
VECTORISED void blips_flip_and_dot(float *restrict x, const uint32_t *restrict words,
                                   const float *restrict y, const float *restrict coef,
                                   float *restrict out, ptrdiff_t rows, ptrdiff_t irrep,
                                   ptrdiff_t channels) {
    ptrdiff_t words_per_row = (channels + 31) / 32;
    for (ptrdiff_t row = 0; row < rows; row++, words += words_per_row) {
        float sum = 0.0f;
        for (ptrdiff_t i = 0; i < irrep; i++)
            for (ptrdiff_t first = 0; first < channels; first += 32) {
                uint32_t word = words[first / 32];
                int count = count_of(first, channels);
                sum += BY_WORD(flip_and_dot_word, count, x, y, word);
                x += count;
                y += count;
            }
        out[row] = sum / (2.0f * coef[row]);
    }
}

/* out = sum over a row of x * y; [rows, width] */
VECTORISED void blips_row_dot(const float *restrict x, const float *restrict y,
                              float *restrict out, ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t row = 0; row < rows; row++, x += width, y += width) {
        float sum = 0.0f;
        for (ptrdiff_t j = 0; j < width; j++) sum += x[j] * y[j];
        out[row] = sum;
    }
}

/* Samples k of rows e that all share: z[k, e] = mean[e] + scale[k, e] * sign * noise[group[k], e],
 * for `rows` rows from `first` on; in z, scale and words a sample has `all_rows`. */
VECTORISED void blips_shared_noise(const float *restrict mean, const float *restrict noise,
                                   const int64_t *restrict group, const uint32_t *restrict words,
                                   const float *restrict scale, float *restrict z, ptrdiff_t first,
                                   ptrdiff_t all_rows, ptrdiff_t samples, ptrdiff_t rows,
                                   ptrdiff_t channels) {
    ptrdiff_t words_per_row = (channels + 31) / 32;
    for (ptrdiff_t k = 0; k < samples; k++) {
        ptrdiff_t start = k * all_rows + first;
        const float *m = mean, *u = noise + group[k] * rows * channels;
        const uint32_t *word = words + start * words_per_row;
        float *out = z + start * channels;
        for (ptrdiff_t row = 0; row < rows; row++)
            for (ptrdiff_t channel = 0; channel < channels; channel += 32, word++) {
                int count = count_of(channel, channels);
                float factor = scale[start + row];
                for (int j = 0; j < count; j++) out[j] = m[j] + factor * flipped(u[j], *word, j);
                out += count;
                m += count;
                u += count;
            }
    }
}

/* The sums over a row of grad * dz/dx, with x what mean and noise depend on, and of grad * dz/dscale:
 * by_x = <grad, mean_slope + scale * sign * noise_slope>, by_scale = <grad, sign * noise> */
VECTORISED void blips_shared_slopes(const float *restrict grad, const float *restrict mean_slope,
                                    const float *restrict noise, const float *restrict noise_slope,
                                    const int64_t *restrict group, const uint32_t *restrict words,
                                    const float *restrict scale, float *restrict by_x,
                                    float *restrict by_scale, ptrdiff_t first, ptrdiff_t all_rows,
                                    ptrdiff_t samples, ptrdiff_t rows, ptrdiff_t channels) {
    ptrdiff_t words_per_row = (channels + 31) / 32;
    for (ptrdiff_t k = 0; k < samples; k++) {
        ptrdiff_t start = k * all_rows + first;
        const float *g = grad + start * channels, *m = mean_slope;
        const float *u = noise + group[k] * rows * channels;
        const float *v = noise_slope + group[k] * rows * channels;
        const uint32_t *word = words + start * words_per_row;
        for (ptrdiff_t row = start; row < start + rows; row++) {
            float of_mean = 0.0f, of_noise = 0.0f, of_slope = 0.0f;
            for (ptrdiff_t channel = 0; channel < channels; channel += 32, word++) {
                int count = count_of(channel, channels);
                for (int j = 0; j < count; j++) {
                    float signed_grad = flipped(g[j], *word, j);
                    of_mean += g[j] * m[j];
                    of_noise += signed_grad * u[j];
                    of_slope += signed_grad * v[j];
                }
                g += count;
                m += count;
                u += count;
                v += count;
            }
            by_x[row] = of_mean + scale[row] * of_slope;
            by_scale[row] = of_noise;
        }
    }
}

/* Word `number` of the stream of a seed: Steele, Lea, Flood's SplitMix64 (2014). */
static inline uint64_t random_word(uint64_t seed, uint64_t number) {
    uint64_t word = seed + number * 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

/* out[k, i] = word first + i of seed k */
VECTORISED void blips_random_words(const uint64_t *seeds, uint64_t *restrict out, uint64_t first,
                                   ptrdiff_t streams, ptrdiff_t count) {
    for (ptrdiff_t k = 0; k < streams; k++)
        for (ptrdiff_t i = 0; i < count; i++)
            out[k * count + i] = random_word(seeds[k], first + (uint64_t)i);
}

/* out[k, i] = table[16 bits], four from each word of seed k */
VECTORISED void blips_random_values(const uint64_t *seeds, const float *restrict table,
                                    float *restrict out, uint64_t first, ptrdiff_t streams,
                                    ptrdiff_t count) {
    enum { WORDS = 64 };
    uint64_t words[WORDS];
    uint16_t index[4 * WORDS];
    for (ptrdiff_t k = 0; k < streams; k++, out += count)
        for (ptrdiff_t start = 0; start < count; start += 4 * WORDS) {
            for (int i = 0; i < WORDS; i++)
                words[i] = random_word(seeds[k], first + (uint64_t)(start / 4 + i));
            memcpy(index, words, sizeof index);
            ptrdiff_t left = count - start < 4 * WORDS ? count - start : 4 * WORDS;
            for (ptrdiff_t i = 0; i < left; i++) out[start + i] = table[index[i]];
        }
}

/* z [edges, width] += ends[first] [first half] + ends[second] [second half], ends [nodes, 2 width];
 * first and second are the rows of `nodes`, [2, edges]. */
VECTORISED void blips_add_ends(const float *restrict ends, const int64_t *restrict nodes,
                               float *restrict z, ptrdiff_t edges, ptrdiff_t width) {
    for (ptrdiff_t e = 0; e < edges; e++, z += width) {
        const float *first = ends + nodes[e] * 2 * width;
        const float *second = ends + nodes[edges + e] * 2 * width + width;
        for (ptrdiff_t j = 0; j < width; j++) z[j] += first[j] + second[j];
    }
}

/* ends[first] [first half] += z and ends[second] [second half] += z, as above. */
VECTORISED void blips_sum_at_ends(const float *restrict z, const int64_t *restrict nodes,
                                  float *restrict ends, ptrdiff_t edges, ptrdiff_t width) {
    for (ptrdiff_t e = 0; e < edges; e++, z += width) {
        float *first = ends + nodes[e] * 2 * width;
        float *second = ends + nodes[edges + e] * 2 * width + width;
        for (ptrdiff_t j = 0; j < width; j++) first[j] += z[j];
        for (ptrdiff_t j = 0; j < width; j++) second[j] += z[j];
    }
}
