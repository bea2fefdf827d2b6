//! A view of one row of floats per token, the rows a fixed stride apart: q, k or v as they lie in the output of
//! a fused projection, without a copy.

/// `width` floats per token, `stride` floats from one token's to the next's.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    width: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows that follow one another: `data` is tokens × `width`.
    ///
    /// # Panics
    /// If `width` is 0 or does not divide `data`.
    pub fn packed(data: &'a [f32], width: usize) -> Self {
        assert!(
            width > 0 && data.len().is_multiple_of(width),
            "{} floats are no rows of {width}",
            data.len()
        );
        Self { data, width, stride: width }
    }

    /// Columns `first..first + width` of `data`, which is tokens × `stride`.
    ///
    /// # Panics
    /// If the columns do not fit the stride, or `stride` is 0 or does not divide `data`.
    pub fn columns(data: &'a [f32], stride: usize, first: usize, width: usize) -> Self {
        assert!(
            stride > 0 && data.len().is_multiple_of(stride),
            "{} floats are no rows of {stride}",
            data.len()
        );
        assert!(
            width > 0 && first <= stride && width <= stride - first,
            "columns {first}+{width} of rows of {stride}"
        );
        Self { data: data.get(first..).unwrap_or_default(), width, stride }
    }

    /// The number of rows.
    pub fn tokens(&self) -> usize {
        self.data.len().div_ceil(self.stride)
    }

    /// Floats in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The row of one token.
    ///
    /// # Panics
    /// If there are not that many.
    #[inline]
    pub fn row(&self, token: usize) -> &'a [f32] {
        &self.data[token * self.stride..][..self.width]
    }
}
